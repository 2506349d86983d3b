"""DENSE: data-free one-shot federated learning.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. NeurIPS 2022. https://arxiv.org/abs/2112.12371

Clients train to convergence and send their models, nothing else. The server distils their ensemble
T (strategies/ensemble.py) into one model, the student S, on images that it makes itself. In each of
``epochs`` rounds of its own:

    generation     a generator G of new random numbers, and its noise z, take ``steps`` of Adam on
                   one_hot L_CE + bn L_BN + adversarial L_div, over views v of the images G(z):
        L_CE  = CE(T(v), y), y random labels
        L_BN  = sum_i sum_l ||mu_l(v) - mu_il|| + ||var_l(v) - var_il||
        L_div = - mean_v [argmax S(v) != argmax T(v)] KL(T(v) || S(v))
                   and the images of the step with the lowest loss join the pool;
    distillation   one pass over the whole pool, SGD on tau^2 KL(T || S), both at temperature tau.

mu_il, var_il are the running statistics of client i's l-th BatchNorm layer: a network without any
has L_BN = 0, as MA-Echo's MLP. adversarial = 0 generates without looking at the student.

Weights, steps and rates are those of the authors' README (those of their argument parser are not
the paper's: all weights 0, tau 1, 10 epochs). As in their code L_BN is the sum over clients (the
paper: the mean), and G is drawn anew every epoch. Where this differs from it:

    the student starts at the plain mean of the clients' models; the code computes that mean, shows
        its accuracy, and then starts from fresh random numbers: ``initial=server``, in round 1
    models take normalised inputs here, so the views are normalised; the code's take pixels
    the same views in both stages, with a border of ``crop_padding`` and mirrored where ``flip``;
        the code mirrors everything, digits too, and in distillation cuts only CIFAR's images
    pixels of the pool are rounded to 8 bits and held in memory, where the code writes them as PNG
        files, whose 8 bits are cut off, not rounded
    the student is in evaluation mode during generation; the code's is in training mode at first
    the last student is the result; the code keeps the epoch that was best on the test set

The teacher is the plain mean of logits, as in the paper. Where clients lack classes it is poor (on
MA-Echo's golden case 31 %, where the masked one has 81), and S can hardly be better:
``masked_teacher`` takes the other, for which the clients' class counts go up, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO
from typing import Literal, Unpack

import torch
from flwr.common.logger import log
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import ConfigError, require_choice, require_range, require_whole
from strategies.base import Reply, Tensors
from strategies.components.aggregators import mean_of
from strategies.components.local_optimizers import SGD, Adam
from strategies.ensemble import MeanLogits, mean_logits, require_logits
from strategies.fusion.image_generator import Generator, view
from strategies.round.federated import FederatedStrategy, Slots
from strategies.round.server_model import ServerModel
from strategies.statistics.class_counts import ClassCountsClient, ClassCountsServer

Initial = Literal["average", "server"]
_SHOWN = 20  # epochs that are logged

# ---- losses --------------------------------------------------------------------------------------


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return tau^2 KL(softmax(teacher / tau) || softmax(student / tau)) of every row (B,).

    Args:
        student: logits (B, C).
        teacher: logits (B, C).
        temperature: tau.
    """
    mine = F.log_softmax(student / temperature, dim=1)
    # by its logarithm: a probability that rounds to 0 would have the gradient NaN
    wanted = F.log_softmax(teacher / temperature, dim=1)
    return temperature**2 * F.kl_div(mine, wanted, reduction="none", log_target=True).sum(1)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Return L_div, from 0 down: minus the divergence where the two classes differ, over all rows.

    Args:
        student: logits (B, C).
        teacher: logits (B, C).
    """
    differ = student.argmax(1) != teacher.argmax(1)
    return -(divergence(student, teacher) * differ).mean()


@contextmanager
def statistics_gaps(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect ||mean - running mean|| + ||var - running var|| of every BatchNorm that is passed."""
    gaps: list[Tensor] = []

    def note(layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        others = [dim for dim in range(inputs[0].dim()) if dim != 1]
        var, mean = torch.var_mean(inputs[0], dim=others, correction=0)
        gaps.append((layer.running_mean - mean).norm() + (layer.running_var - var).norm())

    hooks = [
        layer.register_forward_hook(note)
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


# ---- the two stages ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """How an epoch's images are made.

    Attributes:
        steps: of Adam.
        images: how many.
        latent: numbers of noise an image.
        width: of the generator.
        lr: of Adam, whose betas are .5 and .999.
        one_hot: weight of L_CE.
        bn: weight of L_BN.
        adversarial: weight of L_div.
    """

    steps: int = 30
    images: int = 256
    latent: int = 256
    width: int = 64
    lr: float = 0.001
    one_hot: float = 1.0
    bn: float = 1.0
    adversarial: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("steps", "images", "latent", "width"):
            require_range(f"strategy.dense.{name}", getattr(self, name), low=1)
        require_range("strategy.dense.generator_lr", self.lr, open_low=True)
        for name in ("one_hot", "bn", "adversarial"):
            require_range(f"strategy.dense.{name}", getattr(self, name))


@dataclass(frozen=True)
class Distillation:
    """How the student learns.

    Attributes:
        batch_size: of its passes over the pool.
        lr: of SGD.
        momentum: of SGD.
        temperature: tau.
    """

    batch_size: int = 256
    lr: float = 0.005
    momentum: float = 0.9
    temperature: float = 20.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        require_range("strategy.dense.batch_size", self.batch_size, low=2)
        require_range("strategy.dense.lr", self.lr, open_low=True)
        require_range("strategy.dense.momentum", self.momentum, high=1.0)
        require_range("strategy.dense.temperature", self.temperature, open_low=True)


@dataclass(frozen=True)
class Views:
    """How images of pixels in [0, 1] become inputs: cut and mirrored at random, normalised.

    Attributes:
        black: what a pixel of 0 is as an input (C, 1, 1).
        white: the same of a pixel of 1.
        padding: of the border that views are cut from.
        flip: mirror half of them.
        generator: draws.
    """

    black: Tensor
    white: Tensor
    padding: int
    flip: bool
    generator: torch.Generator

    def __call__(self, images: Tensor) -> Tensor:
        """Return inputs (B, C, H, W)."""
        seen = view(images, self.padding, self.flip, self.generator)
        return self.black + (self.white - self.black) * seen


def generate(
    maker: Generator,
    teacher: MeanLogits,
    student: nn.Module,
    views: Views,
    how: Generation,
) -> tuple[Tensor, dict[str, float]]:
    """Return an epoch's images (images, C, H, W) in [0, 1], and the losses of their step by name.

    Args:
        maker: drawn anew and trained here.
        teacher: in eval mode.
        student: is put in eval mode.
        views: of the images; its generator draws the numbers, noise and labels, too.
        how: steps, weights.
    """
    student.eval()
    maker.reset(views.generator)
    device, classes = views.black.device, teacher.shares.shape[1]
    noise = torch.randn(how.images, how.latent, generator=views.generator).to(device)
    labels = torch.randint(classes, (how.images,), generator=views.generator).to(device)
    trained = {**dict(maker.named_parameters()), "noise": noise.requires_grad_()}
    optimizer = Adam(betas=(0.5, 0.999))
    optimizer.start(trained, how.lr)
    lowest, best, shown = float("inf"), torch.empty(0), {}
    for _ in range(how.steps):
        images = maker(noise)
        inputs = views(images)
        with statistics_gaps(teacher) as gaps:
            wanted = teacher(inputs)[1]
        losses = {
            "one_hot": F.cross_entropy(wanted, labels),
            "bn": torch.stack(gaps).sum() if gaps else wanted.new_zeros(()),
            "adversarial": disagreement(student(inputs)[1], wanted),
        }
        loss = torch.stack([getattr(how, name) * value for name, value in losses.items()]).sum()
        if loss.item() < lowest:
            lowest, best = loss.item(), images.detach()
            shown = {name: value.item() for name, value in losses.items()}
        maker.zero_grad()
        noise.grad = None
        loss.backward(inputs=list(trained.values()))  # type: ignore[no-untyped-call]
        optimizer.move()
    return best, shown


def distil(
    student: nn.Module,
    teacher: MeanLogits,
    pool: Tensor,
    views: Views,
    optimizer: SGD,
    how: Distillation,
) -> dict[str, float]:
    """Train the student for a pass over the pool; return the mean divergence and agreement.

    Args:
        student: trained in place, in training mode.
        teacher: in eval mode.
        pool: images (n, C, H, W), uint8.
        views: of the images; its generator draws the order, too.
        optimizer: of the student.
        how: batch size, temperature.
    """
    student.train()
    lost, agreed = torch.zeros(2, device=pool.device)
    order = torch.randperm(len(pool), generator=views.generator)
    for chosen in torch.split(order, how.batch_size):
        if len(chosen) == 1 < len(pool):  # of which BatchNorm has no variance
            continue
        inputs = views(pool[chosen.to(pool.device)].float() / 255)
        with torch.no_grad():
            wanted = teacher(inputs)[1]
        logits = student(inputs)[1]
        each = divergence(logits, wanted, how.temperature)
        student.zero_grad()
        each.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.move()
        lost += each.detach().sum()
        agreed += (logits.argmax(1) == wanted.argmax(1)).sum()
    return {"divergence": float(lost) / len(pool), "agreement": float(agreed) / len(pool)}


# ---- the aggregator ------------------------------------------------------------------------------


class Distilled:
    """DENSE's aggregator: the student that the clients' ensemble has taught.

    Args:
        generation: of the images.
        distillation: of the student.
        epochs: of both stages.
        masked_teacher: the masked ensemble in place of the plain one; needs class counts.
        initial: where the student starts: at the clients' "average", or at x, what the "server"
            has sent.
        crop_padding: width of the black border that views are cut from; 0: no cut.
        flip: mirror half of the views.
        seed: of all that is drawn.
    """

    def __init__(
        self,
        generation: Generation | None = None,
        distillation: Distillation | None = None,
        epochs: int = 200,
        masked_teacher: bool = False,
        initial: Initial = "average",
        crop_padding: int = 4,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        key = "strategy.dense"
        self.generation = generation or Generation()
        self.distillation = distillation or Distillation()
        self.epochs = require_whole(f"{key}.epochs", epochs, low=0)
        self.masked_teacher = masked_teacher
        self.initial = require_choice(f"{key}.initial", initial, ("average", "server"))
        self.crop_padding = require_whole(f"{key}.crop_padding", crop_padding)
        self.flip, self.seed = flip, seed

    def bind(self, network: ServerModel) -> None:
        """Take the network.

        Raises:
            ConfigError: if its inputs are no images, or it has no logits.
        """
        require_logits("strategy=dense", network)
        if network.black is None or network.white is None or len(network.input_shape) != 3:
            raise ConfigError(
                f"strategy=dense generates images, and inputs of shape {network.input_shape} are "
                "none: choose another task, or another strategy"
            )
        self._network = network
        self._range = network.black[:, None, None], network.white[:, None, None]

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return what leads from x, buffers included, to the student."""
        teacher = mean_logits(self._network, replies, masked=self.masked_teacher)
        student = self._student(replies)
        with _seeded(self.seed, self._network.device) as generator:
            views = Views(*self._range, self.crop_padding, self.flip, generator)
            self._train(student, teacher, views)
        sent, own = self._network.model.state_dict(), student.state_dict()
        names = [*params, *replies[0].buffers]
        return {name: (own[name] - sent[name]).cpu() for name in names}

    def _student(self, replies: Sequence[Reply]) -> nn.Module:
        student = copy.deepcopy(self._network.model)
        if self.initial == "average":
            models = [self._network.trained(reply) for reply in replies]
            student.load_state_dict(mean_of(models, [1.0] * len(models)), strict=False)
        return student

    def _train(self, student: nn.Module, teacher: MeanLogits, views: Views) -> None:
        how, shape = self.generation, self._network.input_shape
        device = self._network.device
        maker = Generator(how.latent, how.width, shape).to(device)
        maker = maker.to(memory_format=torch.channels_last)  # up to 1.6 times as fast on a CPU
        pool = torch.empty(self.epochs * how.images, *shape, dtype=torch.uint8, device=device)
        learning = self.distillation
        optimizer = SGD(learning.momentum)
        optimizer.start(dict(student.named_parameters()), learning.lr)
        for epoch in range(self.epochs):
            images, losses = generate(maker, teacher, student, views, how)
            filled = (epoch + 1) * how.images
            pool[filled - how.images : filled] = (255 * images).round()
            learnt = distil(student, teacher, pool[:filled], views, optimizer, learning)
            if (epoch + 1) % max(1, self.epochs // _SHOWN) == 0:
                _show(epoch + 1, self.epochs, losses | learnt)


def _show(epoch: int, epochs: int, figures: Mapping[str, float]) -> None:
    told = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
    log(INFO, "DENSE: epoch %s of %s: %s", epoch, epochs, told)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[torch.Generator]:
    """Give a generator, and seed torch's own, which dropout draws from, inside the block only."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


class DENSE(FederatedStrategy):
    """One round, whose replies are distilled: ``DENSE(server_model=ServerModel(...))``.

    Args:
        epochs: of generation and distillation.
        masked_teacher: the masked ensemble in place of the plain one.
        slots: of :class:`FederatedStrategy`; ``server_model`` is required.
    """

    def __init__(
        self, epochs: int = 200, masked_teacher: bool = False, **slots: Unpack[Slots]
    ) -> None:
        slots.setdefault("aggregator", Distilled(epochs=epochs, masked_teacher=masked_teacher))
        super().__init__(
            client_sides={"class_counts": ClassCountsClient(masked_teacher)},
            server_sides={"class_counts": ClassCountsServer(masked_teacher)},
            **slots,
        )
