"""FedLESAM: locally estimated global perturbations are better than local perturbations for
federated sharpness-aware minimization.

Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang. ICML 2024. https://arxiv.org/abs/2405.18890

A client estimates where the global loss rises by the way that the global model came since it last
took part (Algorithm 1), and climbs there in all steps of a round:

    e = rho (x_last - x) / ||x_last - x||       x_last: the x that this client last received
    y <- y - eta_l grad f_i(y + e)

It takes one gradient a step, where FedSAM takes two. In its first round a client has no e. rho = 0
is FedAvg with the plain mean. x_last (d numbers) stays at the client; nothing travels beside the
model. ``strategy=[fedlesam,scaffold]`` is the paper's FedLESAM-S. The reported train loss is that
at y + e.

In the released code e is made of the last round's Delta also for clients that took no part in it,
is divided by the sum of the tensors' norms in place of the norm of all, and moves the i-th tensor
by the i-th single number of the flattened Delta; here each number has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import (
    Backward,
    ClientSide,
    Correct,
    LocalContext,
    LocalSummary,
    NextBatch,
    Payloads,
    Tensors,
    subtract,
)
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.local_optimizers import optimizer_settings
from fedhet.strategies.fedsam import SAM
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.update_diagnostics import norm

RECEIVED = "fedlesam_received"  # x_last, in the client state
_LEAST_NORM = 1e-7


class LESAM(SAM):
    """SGD along the gradient at a fixed distance rho.

    Attributes:
        direction: to go there, by the names of the tensors that move; none in a first round.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.direction: Tensors = {}

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        super().start(params, lr)
        self.moved = [params[name] for name in self.direction]
        factor = self.rho / (norm(self.direction) + _LEAST_NORM)
        self.perturbation = [factor * value for value in self.direction.values()]

    def step(self, next_batch: NextBatch, backward: Backward, correct: Correct) -> Tensor:
        """Take one step and return the loss at y + e."""
        batch = next_batch()
        start = [param.detach().clone() for param in self.moved]
        self._place(torch._foreach_add(start, self.perturbation) if start else start)
        loss = backward(batch)
        self._place(start)
        correct()
        self.move()
        return loss

    @torch.no_grad()
    def _place(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self.moved, values, strict=True):
            param.copy_(value)


class FedLESAMClient(ClientSide):
    """Remembers the received model, and tells the optimizer the way from the present one."""

    def begin(self, context: LocalContext) -> None:
        """Point to where the model came from."""
        if not isinstance(context.optimizer, LESAM):
            raise ConfigError("FedLESAM takes its own steps: set local.optimizer=fedlesam")
        self.optimizer = context.optimizer
        self.optimizer.direction = subtract(context.state.get(RECEIVED, {}), context.anchor)

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep x; nothing is sent."""
        self.optimizer.direction = {}
        context.state[RECEIVED] = {name: x.clone() for name, x in context.anchor.items()}
        return {}


class FedLESAM(Method):
    """FedLESAM (Fan et al. 2024): sharpness-aware steps along the way that the global model came,
    with one gradient a step; for clients that return.
    """

    replaces = frozenset({"optimizer"})
    settings = optimizer_settings("fedlesam", LESAM, "rho")
    requires = MappingProxyType({"local.optimizer": "fedlesam"})

    rho: NotNegative = 0.1
    """radius of the perturbation; 0 is FedAvg with the plain mean"""

    def parts(self) -> Parts:
        """Estimate the perturbation, and average the updates without weights."""
        return Parts(client_sides={"fedlesam": FedLESAMClient()}, aggregator=UniformMean())
