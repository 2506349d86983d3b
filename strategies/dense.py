"""DENSE: data-free one-shot federated learning.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. NeurIPS 2022. https://arxiv.org/abs/2112.12371

Clients train to convergence and send only their models. The server distils their ensemble T
(strategies/ensemble.py) into one model, the student S, on images that it generates itself. Each of
``epochs`` epochs has two stages:

    generation     a generator G with new random weights and its noise z take ``steps`` of Adam on
                   one_hot L_CE + bn L_BN + adversarial L_div, over views v of the images G(z):
        L_CE  = CE(T(v), y), y random labels
        L_BN  = sum_i sum_l ||mu_l(v) - mu_il|| + ||var_l(v) - var_il||
        L_div = - mean_v [argmax S(v) != argmax T(v)] KL(T(v) || S(v))
                   and the images of the step with the lowest loss join the pool;
    distillation   one pass over the whole pool, SGD on tau^2 KL(T || S), both at temperature tau.

mu_il, var_il are the running statistics of client i's l-th BatchNorm layer; a network without
BatchNorm has L_BN = 0. adversarial = 0 generates without the student.

Weights, steps and rates are those of the authors' README (their argument parser has all weights 0,
tau 1, 10 epochs). L_BN is the sum over clients, as their code has it (the paper: the mean), though
there it is 0: the ensemble keeps its models in a list, where its search for BatchNorm finds none. G
is drawn anew every epoch. Differences from their code:

    the student starts at the plain mean of the clients' models; the code computes that mean, then
        starts from fresh random numbers: ``initial=server``, in round 1
    models take normalised inputs here, so the views are normalised; the code's take pixels
    the same views in both stages, with a border of ``crop_padding`` and mirrored where ``flip``;
        the code mirrors everything, digits too, and in distillation crops only CIFAR's images
    pixels of the pool are rounded to 8 bits and held in memory; the code truncates them in PNG
        files
    the student is in evaluation mode during generation; the code's is in training mode at first
    the last student is the result; the code keeps the epoch that was best on the test set

The teacher is the plain mean of logits, as in the paper, which is poor where clients lack classes;
``masked_teacher`` takes the masked ensemble, for which clients also send their class counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from logging import INFO
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from flwr.common.logger import log
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.common.configured import Key, Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, NotNegative, Positive, Seed, Share, Two, Whole
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.components.aggregators import mean_of
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.ensemble import MeanLogits, mean_logits, require_logits
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import class_count_parts

_LOG_LINES = 20
Initial = Literal["average", "server"]


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return tau^2 KL(softmax(teacher / tau) || softmax(student / tau)) of logits (B, C), (B,)."""
    predicted = F.log_softmax(student / temperature, dim=1)
    # the target as a logarithm: a probability that rounds to 0 would have the gradient NaN
    target = F.log_softmax(teacher / temperature, dim=1)
    return temperature**2 * F.kl_div(predicted, target, reduction="none", log_target=True).sum(1)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Return L_div <= 0 of logits (B, C): minus the divergence of rows whose classes differ."""
    differ = student.argmax(1) != teacher.argmax(1)
    return -(divergence(student, teacher) * differ).mean()


@contextmanager
def statistics_gaps(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect ||mean - running mean|| + ||var - running var|| of every BatchNorm layer used."""
    gaps: list[Tensor] = []

    def note(layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        others = [dim for dim in range(inputs[0].dim()) if dim != 1]
        var, mean = torch.var_mean(inputs[0], dim=others, correction=0)
        gaps.append((layer.running_mean - mean).norm() + (layer.running_var - var).norm())

    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                hooks.enter_context(layer.register_forward_hook(note))
        yield gaps


def generate(
    maker: Generator, teacher: MeanLogits, student: nn.Module, views: Views, how: DENSE
) -> tuple[Tensor, dict[str, float]]:
    """Return an epoch's images (images, C, H, W) in [0, 1], and the losses of their step by name.

    The teacher is in eval mode. The views' generator also draws weights, noise and labels.
    """
    student.eval()
    maker.reset(views.generator)
    device, classes = views.black.device, teacher.shares.shape[1]
    noise = torch.randn(how.images, how.latent, generator=views.generator).to(device)
    labels = torch.randint(classes, (how.images,), generator=views.generator).to(device)
    trained = {**dict(maker.named_parameters()), "noise": noise.requires_grad_()}
    optimizer = Adam(betas=(0.5, 0.999))
    optimizer.start(trained, how.generator_lr)
    lowest, best, best_losses = float("inf"), torch.empty(0), {}
    for _ in range(how.steps):
        images = maker(noise)
        inputs = views(images)
        with statistics_gaps(teacher) as gaps:
            logits = teacher(inputs)[1]
        losses = {
            "one_hot": F.cross_entropy(logits, labels),
            "bn": torch.stack(gaps).sum() if gaps else logits.new_zeros(()),
            "adversarial": disagreement(student(inputs)[1], logits),
        }
        loss = torch.stack([getattr(how, name) * value for name, value in losses.items()]).sum()
        if loss.item() < lowest:
            lowest, best = loss.item(), images.detach()
            best_losses = {name: value.item() for name, value in losses.items()}
        maker.zero_grad()
        noise.grad = None
        loss.backward(inputs=list(trained.values()))  # type: ignore[no-untyped-call]
        optimizer.move()
    return best, best_losses


def distil(
    student: nn.Module,
    teacher: MeanLogits,
    pool: Tensor,
    views: Views,
    optimizer: SGD,
    how: DENSE,
) -> dict[str, float]:
    """Train the student for a pass over the pool; return the mean divergence and agreement.

    The pool holds images (n, C, H, W) as uint8; the views' generator also draws their order.
    """
    student.train()
    lost, agreed = torch.zeros(2, device=pool.device)
    order = torch.randperm(len(pool), generator=views.generator)
    for chosen in torch.split(order, how.batch_size):
        if len(chosen) == 1 < len(pool):  # BatchNorm has no variance of a single image
            continue
        inputs = views(pool[chosen.to(pool.device)].float() / 255)
        with torch.no_grad():
            target = teacher(inputs)[1]
        logits = student(inputs)[1]
        each = divergence(logits, target, how.temperature)
        student.zero_grad()
        each.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.move()
        lost += each.detach().sum()
        agreed += (logits.argmax(1) == target.argmax(1)).sum()
    return {"divergence": float(lost) / len(pool), "agreement": float(agreed) / len(pool)}


class Generator(nn.Module):
    """Maps noise (B, z) to images (B, C, H, W) of pixels in [0, 1]; always in training mode.

    A linear layer to a quarter of the size, then twice nearest-neighbour upsampling and a 3 x 3
    convolution with BatchNorm and leaky ReLU; ``width`` channels before the last convolution.
    """

    def __init__(self, latent: int, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, columns = shape
        self.start = (2 * width, math.ceil(height / 4), math.ceil(columns / 4))
        self.linear = nn.Linear(latent, math.prod(self.start))
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(size=(height, columns)),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew: N(0, .02^2), of BatchNorm N(1, .02^2); biases are 0."""
        for module in self.modules():
            if not isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
                continue
            mean = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
            drawn = torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_(mean + 0.02 * drawn)
            if module.bias is not None:
                module.bias.zero_()

    def forward(self, noise: Tensor) -> Tensor:
        """Return images."""
        images: Tensor = self.blocks(self.linear(noise).unflatten(1, self.start))
        return images


@dataclass(frozen=True)
class Views:
    """Turns images of pixels in [0, 1] into inputs: randomly cropped and mirrored, normalised."""

    black: Tensor  # the input value of a pixel of 0 (C, 1, 1)
    white: Tensor  # the input value of a pixel of 1
    padding: int  # width of the black border that images are cropped from; 0: no crop
    flip: bool  # mirror half of the images
    generator: torch.Generator

    def __call__(self, images: Tensor) -> Tensor:
        """Return inputs (B, C, H, W); the gradient passes through."""
        return self.black + (self.white - self.black) * self.cropped(images)

    def cropped(self, images: Tensor) -> Tensor:
        """Return images cropped from copies with a black border, half of them mirrored."""
        padding, generator = self.padding, self.generator
        if not padding and not self.flip:
            return images
        count, _, height, width = images.shape
        corners = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
        mirrored = torch.zeros(count, 1)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
        rows = corners[0] + torch.arange(height)  # (B, H)
        across = torch.arange(width).expand(count, width)
        columns = corners[1] + torch.where(mirrored.bool(), across.flip(1), across)  # (B, W)
        images = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
        which = torch.arange(count)[:, None, None].to(images.device)
        rows, columns = rows.to(images.device), columns.to(images.device)
        return images[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Distilled:
    """DENSE's aggregator: a student distilled from the clients' ensemble on generated images."""

    reads = Reads.MODELS

    def __init__(self, method: DENSE) -> None:
        self.how = method

    def bind(self, network: ServerModel) -> None:
        """Take the network; refuse one without logits, or whose inputs are not images."""
        require_logits("strategy=dense", network)
        if network.black is None or network.white is None or len(network.input_shape) != 3:
            raise ConfigError(
                f"strategy=dense generates images, but inputs have shape {network.input_shape}: "
                "choose another task or another strategy"
            )
        self._network = network
        self._range = network.black[:, None, None], network.white[:, None, None]

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to the student, buffers included."""
        teacher = mean_logits(self._network, replies, masked=self.how.masked_teacher)
        student = copy.deepcopy(self._network.model)
        if self.how.initial == "average":
            models = [self._network.trained(reply) for reply in replies]
            student.load_state_dict(mean_of(models), strict=False)
        device = self._network.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.how.seed)  # of dropout
            generator = torch.Generator().manual_seed(self.how.seed)
            views = Views(*self._range, self.how.crop_padding, self.how.flip, generator)
            self._train(student, teacher, views)
        sent, own = self._network.model.state_dict(), student.state_dict()
        names = [*params, *replies[0].buffers]
        return {name: (own[name] - sent[name]).cpu() for name in names}

    def _train(self, student: nn.Module, teacher: MeanLogits, views: Views) -> None:
        how, shape, device = self.how, self._network.input_shape, self._network.device
        maker = Generator(how.latent, how.width, shape).to(device)
        maker = maker.to(memory_format=torch.channels_last)  # faster on a CPU
        pool = torch.empty(how.epochs * how.images, *shape, dtype=torch.uint8, device=device)
        optimizer = SGD(momentum=how.momentum)
        optimizer.start(dict(student.named_parameters()), how.lr)
        for epoch in range(1, how.epochs + 1):
            images, losses = generate(maker, teacher, student, views, how)
            filled = epoch * how.images
            pool[filled - how.images : filled] = (255 * images).round()
            figures = losses | distil(student, teacher, pool[:filled], views, optimizer, how)
            if epoch % max(1, how.epochs // _LOG_LINES) == 0:
                text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
                log(INFO, "DENSE: epoch %s of %s: %s", epoch, how.epochs, text)


class DENSE(Method):
    """DENSE (Zhang et al. 2022): one round; distils the ensemble of the clients' models into one,
    on generated images; the server needs no data.
    """

    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.personal": "none", "strategy.aggregator": None})

    masked_teacher: bool = False
    """true: a model has no say in classes that its client does not hold, and clients send class
    counts; false: the plain mean of logits"""
    initial: Initial = "average"
    """where the student starts: average (the mean of the clients' models) | server (the model that
    was sent; in round 1 it is random)"""
    epochs: Whole = 200
    """epochs of generation and distillation"""
    steps: Count = 30
    """steps that the generator takes per epoch"""
    images: Count = 256
    """images that each epoch adds to the pool"""
    latent: Count = 256
    """how many random numbers the generator makes an image from"""
    width: Count = 64
    """channels of the generator's last layers; its time grows with the square"""
    generator_lr: Positive = 0.001
    """step size of the generator (Adam)"""
    one_hot: NotNegative = 1.0
    """weight of the teacher's cross-entropy to random labels"""
    bn: NotNegative = 1.0
    """weight of the distance to the clients' BatchNorm statistics"""
    adversarial: NotNegative = 1.0
    """weight of the divergence where student and teacher differ"""
    crop_padding: Whole = 4
    """width of the black border that images get before a random crop; 0: no crop"""
    flip: Annotated[bool, Refers("${oc.select:task.flip,false}")] = False
    """mirror half of the images; by default as the task does"""
    batch_size: Two = 256
    """images per step of the student"""
    lr: Positive = 0.005
    """step size of the student (SGD)"""
    momentum: Share = 0.9
    """momentum of the student"""
    temperature: Positive = 20.0
    """tau, the temperature of the divergence that the student learns by"""
    seed: Annotated[Seed, Key("seed")] = 0

    def parts(self) -> Parts:
        """Distil the clients' models."""
        counts = class_count_parts() if self.masked_teacher else Parts()
        return counts | Parts(aggregator=Distilled(self))
