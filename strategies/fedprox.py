"""FedProx: federated optimization in heterogeneous networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. https://arxiv.org/abs/1812.06127

Local objective (eq. 2), x the model as received:

    L(y) = CE(y) + (mu / 2) ||y - x||^2

mu = 0 is FedAvg. The norm covers all trainable shared tensors. Clipping sees the whole gradient; in
public code that puts mu into the weight decay, it sees only a part. mu in the papers here: FedDW
.01, FedPVR's code .01, MA-Echo .1; the default is .1, because .01 shows no effect with the recipes'
rate and epochs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class FedProxClient(ClientSide):
    """Adds (mu / 2) ||y - x||^2 to the local objective."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def penalty(self, step: Step) -> Tensor | None:
        """Return (mu / 2) ||y - x||^2, a scalar; None at mu = 0."""
        if self.mu == 0.0 or not step.context.anchor:  # of a personal tensor there is no x
            return None
        squares = [(step.params[n] - x).square().sum() for n, x in step.context.anchor.items()]
        return 0.5 * self.mu * torch.stack(squares).sum()


class FedProx(Method):
    """FedProx (Li et al. 2020): adds (mu / 2) ||y - x||^2 to the local objective, which keeps long
    local training near the global model."""

    mu: NotNegative = 0.1
    """weight of the term; 0 is FedAvg. On digits 0.01 changes nothing, 1 slows it"""

    def parts(self) -> Parts:
        """Add the term at the clients."""
        return Parts(client_sides={"fedprox": FedProxClient(self.mu)})
