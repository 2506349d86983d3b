"""FedSMOO: dynamic regularized sharpness aware minimization in federated learning: approaching
global consistency and smooth landscape.

Sun, Shen, Chen, Ding, Tao. ICML 2023. https://arxiv.org/abs/2305.11584

FedSpeed (fedspeed.py), whose clients also agree on the perturbation (Algorithm 1): s is the common
one, and a dual variable m_i pulls client i's to it.

    local step    v = grad f_i(y) - m_i - s,   e = rho v / ||v||,   m_i <- m_i + e - s
                  y <- y - eta_l (grad f_i(y + e) + mu (y - x + h_i))
    server        s <- rho mean_{i in S} m_i / ||mean_{i in S} m_i||,   h_i, H and x as in FedSpeed

s, m_i start at zero, norms are over all tensors, and 1e-7 is added to them. s travels down (d
numbers), m_i up (d); m_i and h_i stay at the client. rho = 0 is FedSpeed at rho = 0, and mu = 0
leaves only the perturbation. ``server.lr`` must be 1.

This is the released code (FL-Simulator; mu .1, rho .1). In the paper the server averages m_i
and the last e of each client.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalSummary,
    Payloads,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
    zeros_like,
)
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.local_optimizers import optimizer_settings
from fedhet.strategies.feddyn import FedDynServer
from fedhet.strategies.fedsam import SAM
from fedhet.strategies.fedspeed import ProximalClient
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.update_diagnostics import norm

COMMON, DUAL = "common_perturbation", "perturbation_dual"  # s and m_i
_LEAST_NORM = 1e-7


class DualSAM(SAM):
    """SAM whose perturbation is pulled to a common one.

    Attributes:
        common: s, by the names of the tensors that have it.
        dual: m_i, which steps change in place; without, it is plain SAM.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.common: Tensors = {}
        self.dual: Tensors = {}

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        super().start(params, lr)
        self.named = params

    @torch.no_grad()
    def _ascend(self, params: list[Tensor]) -> None:
        """Move to y + e, and m_i by e - s."""
        grads = {name: self.named[name].grad for name in self.dual}
        pulled = {name: grad for name, grad in grads.items() if grad is not None}
        for name, grad in pulled.items():
            grad.sub_(self.dual[name] + self.common[name])
        super()._ascend(params)  # the gradients are now e
        for name, grad in pulled.items():
            self.dual[name].add_(grad - self.common[name])


class PerturbationClient(ClientSide):
    """Keeps m_i, gives it to the optimizer, and sends it."""

    needs, sends = frozenset({COMMON}), frozenset({DUAL})

    def begin(self, context: LocalContext) -> None:
        """Give m_i to the optimizer, zero in the client's first round, and s."""
        if not isinstance(context.optimizer, DualSAM):
            raise ConfigError("FedSMOO takes its own steps: set local.optimizer=fedsmoo")
        kept = context.state.get(DUAL) or zeros_like(context.anchor)
        context.optimizer.dual = {name: value.clone() for name, value in kept.items()}
        context.optimizer.common = context.received[COMMON]
        self.optimizer = context.optimizer

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep m_i and send it."""
        dual, self.optimizer.dual = self.optimizer.dual, {}
        context.state[DUAL] = dual
        return {DUAL: dual}


class PerturbationServer(ServerSide):
    """Keeps s, the common perturbation of length rho."""

    needs, sends, kept = frozenset({DUAL}), frozenset({COMMON}), ("common",)

    def __init__(self, rho: float) -> None:
        self.rho = rho

    def init(self, params: Tensors) -> None:
        """Start s at zero."""
        self.common = zeros_like(params)

    def broadcast(self, client_id: int) -> Payloads:
        """Send s."""
        return {COMMON: self.common}

    def expected(self) -> Shapes:
        """Return the names and shapes of s."""
        return {DUAL: {name: tuple(value.shape) for name, value in self.common.items()}}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """s <- rho mean m_i / ||mean m_i||."""
        mean = {name: value / cohort.size for name, value in total.payloads[DUAL].items()}
        factor = self.rho / (norm(mean) + _LEAST_NORM)
        self.common = {name: factor * value for name, value in mean.items()}


class FedSMOO(Method):
    """FedSMOO (Sun et al. 2023): FedSpeed, whose clients also agree on the perturbation, so that
    the global loss gets flat; for clients that return.
    """

    replaces = frozenset({"aggregator", "optimizer", "server_optimizer"})
    settings = optimizer_settings("fedsmoo", DualSAM, "rho")
    requires = MappingProxyType(
        {
            "local.optimizer": "fedsmoo",
            "server.lr": 1.0,
            "strategy.aggregator": None,
            "strategy.server_optimizer": None,
        }
    )

    mu: NotNegative = 0.1
    """weight of the proximal terms, as in FedSpeed"""
    rho: NotNegative = 0.1
    """radius of the perturbation; 0 is FedSpeed without one"""

    def parts(self) -> Parts:
        """Add FedSpeed's terms and the two halves of the common perturbation."""
        return Parts(
            client_sides={
                "fedsmoo": ProximalClient(self.mu),
                "fedsmoo_perturbation": PerturbationClient(),
            },
            server_sides={"fedsmoo_perturbation": PerturbationServer(self.rho)},
            aggregator=UniformMean(),
            server_optimizer=FedDynServer(self.mu),
        )
