"""Asynchronous rounds: how many replies make a step, and what a late one still weighs.

FedBuff     Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. Federated learning with buffered
            asynchronous aggregation. AISTATS 2022. https://arxiv.org/abs/2106.06639
FedAsync    Xie, Koyejo, Gupta. Asynchronous federated optimization. OPT 2020.
            https://arxiv.org/abs/1903.03934

M clients train at any time; the server steps when K replies are there, and waits for nobody else. A
reply of staleness tau (the server has stepped so often since the client got its model) weighs

    constant     1
    polynomial   (1 + tau)^-a                                       FedBuff: a = 1/2
    hinge        1 if tau <= b, else 1 / (a (tau - b) + 1)          FedAsync, section 5

    FedBuff      x <- x + eta_g (1 / K) sum_i s(tau_i) (y_i - x_i)        x_i: what client i got
    FedAsync     x <- x + eta_g s(tau) (y_i - x),  K = 1,  eta_g its alpha

No server optimizer sees buffers: BatchNorm's statistics move by s(tau) alone, in FedAsync, too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fedhet.common.configured import Configured, Key
from fedhet.common.kinds import Count, NotNegative, Seed, Whole

Discount = Literal["constant", "polynomial", "hinge"]


class Asynchronous(Configured):
    """Settings of asynchronous rounds; the sampler's participation is M / N."""

    section = "strategy.asynchronous"

    buffer: Count = 10
    """K, replies of a step"""
    discount: Discount = "polynomial"
    """of a reply that is tau steps stale: polynomial, (1 + tau)^-exponent | hinge, 1 up to the
    threshold, then 1 / (exponent (tau - threshold) + 1) | constant"""
    exponent: NotNegative = 0.5
    """a"""
    threshold: NotNegative = 4.0
    """b of hinge"""
    max_staleness: Whole | None = None
    """staler replies are not waited for; null: any count"""
    towards_model: bool = False
    """FedAsync's step, to y_i; false: along the client's change, as FedBuff steps"""
    seed: Annotated[Seed, Key("seed")] = 0

    def weight(self, staleness: int) -> float:
        """Return s(tau)."""
        if self.discount == "polynomial":
            return float((1 + staleness) ** -self.exponent)
        if self.discount == "hinge" and staleness > self.threshold:
            return 1.0 / (self.exponent * (staleness - self.threshold) + 1.0)
        return 1.0

    def too_old(self, staleness: int) -> bool:
        """Return whether a reply is not waited for."""
        return self.max_staleness is not None and staleness > self.max_staleness
