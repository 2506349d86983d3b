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
from typing import Literal, Unpack

import torch
from flwr.common.logger import log
from torch import Tensor, nn

from fedhet.common.errors import ConfigError, require_choice, require_whole
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.components.aggregators import mean_of
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.ensemble import MeanLogits, mean_logits, require_logits
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fusion.distillation import Distillation, Generation, distil, generate
from fedhet.strategies.fusion.image_generator import Generator, Views
from fedhet.strategies.round.arguments import Slots
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import ClassCountsClient, ClassCountsServer

_LOG_LINES = 20


class Distilled:
    """DENSE's aggregator: a student distilled from the clients' ensemble on generated images.

    Args:
        generation: of the images.
        distillation: of the student.
        epochs: of both stages.
        masked_teacher: the masked ensemble instead of the plain one; needs class counts.
        initial: where the student starts: the clients' "average", or the model that the "server"
            has sent.
        crop_padding: width of the black border that views are cropped from; 0: no crop.
        flip: mirror half of the views.
        seed: of all random numbers.
    """

    reads = Reads.MODELS

    def __init__(
        self,
        generation: Generation | None = None,
        distillation: Distillation | None = None,
        epochs: int = 200,
        masked_teacher: bool = False,
        initial: Literal["average", "server"] = "average",
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
        optimizer = SGD(learning.momentum)
        optimizer.start(dict(student.named_parameters()), learning.lr)
        for epoch in range(1, self.epochs + 1):
            images, losses = generate(maker, teacher, student, views, how)
            filled = epoch * how.images
            pool[filled - how.images : filled] = (255 * images).round()
            figures = losses | distil(student, teacher, pool[:filled], views, optimizer, learning)
            if epoch % max(1, self.epochs // _LOG_LINES) == 0:
                text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
                log(INFO, "DENSE: epoch %s of %s: %s", epoch, self.epochs, text)


class DENSE(FederatedStrategy):
    """One round, whose replies are distilled: ``DENSE(server_model=ServerModel(...))``."""

    def __init__(
        self, epochs: int = 200, masked_teacher: bool = False, **slots: Unpack[Slots]
    ) -> None:
        slots.setdefault("aggregator", Distilled(epochs=epochs, masked_teacher=masked_teacher))
        super().__init__(
            client_sides={"class_counts": ClassCountsClient(masked_teacher)},
            server_sides={"class_counts": ClassCountsServer(masked_teacher)},
            **slots,
        )
