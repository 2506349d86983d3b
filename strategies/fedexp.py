"""FedExP: speeding up federated averaging via extrapolation.

Jhunjhunwala, Wang, Joshi. ICLR 2023. https://arxiv.org/abs/2301.09604

FedAvg's clients; the less their updates agree, the further the server goes along the mean update.
With D_i = y_i - x the updates of the round's M clients, over all trainable shared tensors:

    Dbar  = (1 / M) sum_i D_i
    eta_g = max(1, sum_i ||D_i||^2 / (2 M (||Dbar||^2 + eps)))
    x <- x + eta_g Dbar

eta_g = 1 is FedAvg with the plain mean: for one client, for equal or zero updates, for a large eps.
M orthogonal updates of one length have eta_g = max(1, M / 2) at eps = 0. ``server.lr`` multiplies
eta_g: leave it at 1. In metrics.jsonl eta_g is step_norm / (norm_ratio * update_norm).

The paper derives eta_g from the extrapolation of parallel projections, which all start at x
(section 3). fedhet rejects asynchronous rounds: their updates start elsewhere, and a step over
||Dbar||^2 undoes the discount of stale ones.

eps has the unit of squared updates. The released code has .001 on CIFAR-10 and CIFAR-100, and .1 on
EMNIST. It weighs clients by n_i in both sums; its eps is M times this one and shrinks with the
squared step size; and from round 2 on it evaluates the mean of the last two server models
(``strategy/output=last_two``, from round 1 on). It has eta_l .01 (EMNIST .1), decayed by .998 a
round, 20 local steps, weight decay 1e-4 and clip 10.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor

from fedhet.common.kinds import Positive
from fedhet.strategies.base import Reads, ReplySum, Tensors, Weighting
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.update_diagnostics import norm


class ExtrapolatedMean:
    """The plain mean of updates times FedExP's server step size."""

    weighting: Weighting = "clients"
    reads = Reads.NORMS

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def __call__(self, params: Tensors, total: ReplySum) -> dict[str, Tensor]:
        """Return the aggregate."""
        squares = sum(reply.norm**2 for reply in total.replies)
        of_mean = norm(total.update) ** 2 + self.eps
        step_size = max(1.0, squares / (2 * len(total.replies) * of_mean))
        return {name: step_size * value for name, value in total.update.items()}


class FedExP(Method):
    """FedExP (Jhunjhunwala et al. 2023): the less the clients' updates agree, the longer the
    server's step; no key to tune.

    ``strategy/output=last_two`` evaluates as the authors do.
    """

    replaces = frozenset({"aggregator"})
    requires = MappingProxyType({"strategy.aggregator": None})

    eps: Positive = 0.001
    """added to the squared norm of the mean update; the larger, the closer to FedAvg. EMNIST: .1"""

    def parts(self) -> Parts:
        """Extrapolate the mean."""
        return Parts(aggregator=ExtrapolatedMean(self.eps))
