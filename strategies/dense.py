"""DENSE: data-free one-shot federated learning.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. NeurIPS 2022. https://arxiv.org/abs/2112.12371

Clients train to convergence and send only their models. The server distils their ensemble T
(strategies/ensemble.py) into one model, the student S, on images that it generates itself. Each of
``epochs`` epochs has two stages (fusion/distillation.py):

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
from collections.abc import Sequence
from logging import INFO
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from flwr.common.logger import log
from torch import Tensor, nn

from fedhet.common.configured import Key, Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, NotNegative, Positive, Seed, Share, Two, Whole
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.components.aggregators import mean_of
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.fusion.distillation import (
    Distillation,
    Generation,
    Generator,
    Views,
    distil,
    generate,
)
from fedhet.strategies.fusion.mean_logits import MeanLogits, mean_logits, require_logits
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import (
    class_count_parts,
)

_LOG_LINES = 20
Initial = Literal["average", "server"]


class Distilled:
    """DENSE's aggregator: a student distilled from the clients' ensemble on generated images.

    Args:
        method: its settings.
    """

    reads = Reads.MODELS

    def __init__(self, method: DENSE) -> None:
        self.generation, self.distillation = method.generation, method.distillation
        self.epochs, self.masked_teacher = method.epochs, method.masked_teacher
        self.initial, self.crop_padding = method.initial, method.crop_padding
        self.flip, self.seed = method.flip, method.seed

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
        teacher = mean_logits(self._network, replies, masked=self.masked_teacher)
        student = copy.deepcopy(self._network.model)
        if self.initial == "average":
            models = [self._network.trained(reply) for reply in replies]
            student.load_state_dict(mean_of(models), strict=False)
        device = self._network.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)  # of dropout
            generator = torch.Generator().manual_seed(self.seed)
            views = Views(*self._range, self.crop_padding, self.flip, generator)
            self._train(student, teacher, views)
        sent, own = self._network.model.state_dict(), student.state_dict()
        names = [*params, *replies[0].buffers]
        return {name: (own[name] - sent[name]).cpu() for name in names}

    def _train(self, student: nn.Module, teacher: MeanLogits, views: Views) -> None:
        how, learning = self.generation, self.distillation
        shape, device = self._network.input_shape, self._network.device
        maker = Generator(how.latent, how.width, shape).to(device)
        maker = maker.to(memory_format=torch.channels_last)  # faster on a CPU
        pool = torch.empty(self.epochs * how.images, *shape, dtype=torch.uint8, device=device)
        optimizer = SGD(momentum=learning.momentum)
        optimizer.start(dict(student.named_parameters()), learning.lr)
        for epoch in range(1, self.epochs + 1):
            images, losses = generate(maker, teacher, student, views, how)
            filled = epoch * how.images
            pool[filled - how.images : filled] = (255 * images).round()
            figures = losses | distil(student, teacher, pool[:filled], views, optimizer, learning)
            if epoch % max(1, self.epochs // _LOG_LINES) == 0:
                text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
                log(INFO, "DENSE: epoch %s of %s: %s", epoch, self.epochs, text)


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

    @property
    def generation(self) -> Generation:
        """The settings of an epoch's images."""
        weights = {"one_hot": self.one_hot, "bn": self.bn, "adversarial": self.adversarial}
        return Generation(
            self.steps, self.images, self.latent, self.width, self.generator_lr, **weights
        )

    @property
    def distillation(self) -> Distillation:
        """The settings of the student's training."""
        return Distillation(self.batch_size, self.lr, self.momentum, self.temperature)
