"""FedDecorr: mitigating dimensional collapse in heterogeneous federated learning.

Shi, Liang, Zhang, Tan, Bai. ICLR 2023. https://arxiv.org/abs/2210.00226

Under label skew the features of local models, and then of their mean, fill few dimensions. So
local training keeps the features of a batch uncorrelated:

    L(y) = CE(y) + beta / (d (d - 1) B) sum over j != k of ((B - 1) K_jk)^2

K is the correlation matrix (d x d) of the batch's B feature vectors, with 1e-8 added to the
variances. This is the released code's term, whose beta is .1; the paper writes ||K||_F^2 / d^2,
which is about B times smaller. beta = 0 is FedAvg. A batch of one example has no term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

_EPS = 1e-8


class FedDecorrClient(ClientSide):
    """Keeps the features of a batch uncorrelated."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def penalty(self, step: Step) -> Tensor | None:
        """Return beta times the term, a scalar; None at beta = 0, and where nothing correlates."""
        if self.beta == 0.0 or min(step.features.shape) < 2:
            return None
        return self.beta * correlation(step.features)


def correlation(features: Tensor) -> Tensor:
    """Return the term, a scalar, of a batch's features (B, d), B > 1 and d > 1."""
    size, width = features.shape
    with torch.autocast(features.device.type, enabled=False):
        precise = features.to(torch.promote_types(features.dtype, torch.float32))
        scaled = (precise - precise.mean(dim=0)) / (precise.var(dim=0) + _EPS).sqrt()
        squares = (scaled.T @ scaled).square()
    return 2 * squares.triu(diagonal=1).sum() / (width * (width - 1) * size)


class FedDecorr(Method):
    """FedDecorr (Shi et al. 2023): keeps the dimensions of a batch's features uncorrelated, which
    label skew makes collapse; without more bytes.
    """

    beta: NotNegative = 0.1
    """weight of the term; 0 is FedAvg"""

    def parts(self) -> Parts:
        """Add the term at the clients."""
        return Parts(client_sides={"feddecorr": FedDecorrClient(self.beta)})
