"""FedSpeed: larger local interval, less communication round, and higher generalization accuracy.

Sun, Shen, Huang, Ding, Tao. ICLR 2023. https://arxiv.org/abs/2302.10429

FedDyn's clients and server (feddyn.py) with FedSAM's gradient (fedsam.py), in our letters:

    local step    y <- y - eta_l (grad f_i(y + e) + mu (y - x + h_i))       e = rho grad / ||grad||
    client        h_i <- h_i + (y_i - x)
    server        H <- H + (|S| / N) Delta,   x <- x + Delta + H

mu is the paper's 1 / lambda, and - mu h_i its prox-correction. The proximal terms act at y and not
at y + e. rho = 0 is FedDyn, whose output is the new x; mu = 0 is FedSAM with the plain mean, by
convention and not as a limit, as in FedDyn. ``server.lr`` must be 1.

This is the released code (FL-Simulator; mu .1, rho .1), which divides e by the gradient's norm.
In the paper's Algorithm 1 the server averages y_i + h_i over the round's clients, which is the same
if all take part, and the gradient is (1 - alpha) grad f_i(y) + alpha grad f_i(y + e); alpha is 1
here. The code puts mu y into the weight decay, so clipping does not see that term.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import LocalContext, Step, Tensors
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.feddyn import DRIFT_SUM, FedDynClient, FedDynServer
from fedhet.strategies.fedsam import SharpnessAware
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class ProximalClient(FedDynClient):
    """FedDyn's client half, whose terms act at y wherever the gradient of the loss is taken."""

    def penalty(self, step: Step) -> Tensor | None:
        """Return None: the terms are part of no gradient that is taken elsewhere than at y."""
        return None

    @torch.no_grad()
    def correct(self, grads: Tensors, context: LocalContext) -> None:
        """Add mu (y - x + h_i)."""
        if self.alpha > 0.0:
            drift_sum = context.state[DRIFT_SUM]
            for name, x in context.anchor.items():
                grads[name].add_(context.params[name] - x + drift_sum[name], alpha=self.alpha)


class FedSpeed(Method):
    """FedSpeed (Sun et al. 2023): FedDyn's dynamic terms with sharpness-aware steps; for long local
    training of clients that return.
    """

    replaces = frozenset({"aggregator", "optimizer", "server_optimizer"})
    requires = MappingProxyType(
        {"server.lr": 1.0, "strategy.aggregator": None, "strategy.server_optimizer": None}
    )

    mu: NotNegative = 0.1
    """weight of the proximal terms, the paper's 1 / lambda; 0 is FedSAM with the plain mean"""
    sam: SharpnessAware = SharpnessAware()

    def parts(self) -> Parts:
        """Add the clients' terms, and H to the server's step."""
        return Parts(
            client_sides={"fedspeed": ProximalClient(self.mu)},
            aggregator=UniformMean(),
            server_optimizer=FedDynServer(self.mu),
        )
