"""FedCM: federated learning with client-level momentum.

Xu, Wang, Wang, Yao. 2021. https://arxiv.org/abs/2106.10874

A client's step mixes its own gradient with the direction in which all moved in the last round
(Algorithm 2):

    v <- alpha g(y) + (1 - alpha) m
    y <- y - eta_l v

m is the size of a gradient: m <- - Delta / mean_i lr_sum_i, of the round's aggregate Delta, where
``lr_sum``, the sum of the step sizes that client i really took, stands for K eta_l. m starts at
zero, so the steps of round 1 are alpha times FedAvg's. alpha = 1 is FedAvg (with a plain mean); the
paper has alpha = .1. m travels down (d numbers).

alpha multiplies the gradient of the whole local objective, penalties of other methods included.
Clipping sees v; weight decay comes after it and is not multiplied, as in FL-Simulator's code.
A local optimizer with momentum, or Adam, is refused: its displacement is no mean of gradients, and
m would be 1 / (1 - momentum) times too long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from fedhet.common.errors import ConfigError, require_range
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalOptimizer,
    Payloads,
    ReplySum,
    ServerSide,
    Tensors,
    zeros_like,
)
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.round.arguments import Slots
from fedhet.strategies.round.federated import FederatedStrategy

MOMENTUM = "momentum"


class ClientMomentum(ClientSide):
    """The client half: mixes the momentum into every gradient, whose weight is alpha."""

    needs = compressible = frozenset({MOMENTUM})

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = require_range("strategy.client_momentum.alpha", alpha, high=1.0, open_low=True)

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse momentum and Adam."""
        if stateful := optimizer.stateful([name for name, _ in model.named_parameters()]):
            raise ConfigError(
                "client momentum reads a gradient off plain SGD steps, but the local optimizer "
                f"takes others on {sorted(stateful)}: set local.optimizer=sgd (or sam) and "
                "local.momentum=0"
            )

    def correct(self, grads: Tensors, context: LocalContext) -> None:
        """Replace the gradient g by alpha g + (1 - alpha) m."""
        momentum = context.received[MOMENTUM]
        if mixed := [grads[name] for name in momentum]:  # none where every tensor is personal
            torch._foreach_mul_(mixed, self.alpha)
            torch._foreach_add_(mixed, list(momentum.values()), alpha=1.0 - self.alpha)


class ClientMomentumServer(ServerSide):
    """The server half: keeps m."""

    sends = frozenset({MOMENTUM})

    def init(self, params: Tensors) -> None:
        """Start m at zero."""
        self.momentum = zeros_like(params)

    def broadcast(self, client_id: int) -> Payloads:
        """Send m."""
        return {MOMENTUM: self.momentum}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """m <- - Delta / mean lr_sum."""
        lr_sum = math.fsum(reply.lr_sum for reply in total.replies) / len(total.replies)
        self.momentum = {name: value / -lr_sum for name, value in update.items()}

    def state_dict(self) -> Payloads:
        """Return m."""
        return {MOMENTUM: self.momentum}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore m."""
        self.momentum = dict(state[MOMENTUM])


class FedCM(FederatedStrategy):
    """Client momentum and the plain mean of updates; ``aggregator=NormMean()`` is FedCM+."""

    def __init__(self, alpha: float = 0.1, **slots: Unpack[Slots]) -> None:
        slots.setdefault("aggregator", UniformMean())
        super().__init__(
            client_sides={"client_momentum": ClientMomentum(alpha)},
            server_sides={"client_momentum": ClientMomentumServer()},
            **slots,
        )
