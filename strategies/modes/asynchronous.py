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

from dataclasses import dataclass
from typing import Literal, get_args

from fedhet.common.errors import require_choice, require_range, require_whole

Discount = Literal["constant", "polynomial", "hinge"]
_KEY = "strategy.asynchronous"


@dataclass(frozen=True)
class Asynchronous:
    """Settings of asynchronous rounds; the sampler's participation is M / N.

    Attributes:
        buffer: K, the replies of a step.
        discount: s.
        exponent: a.
        threshold: b of hinge.
        max_staleness: older replies are not waited for; None: any count.
        towards_model: FedAsync's step, to y_i and not along y_i - x_i.
        seed: of the run, of who starts next among real clients; a simulated system has its own.
    """

    buffer: int = 10
    discount: Discount = "polynomial"
    exponent: float = 0.5
    threshold: float = 4.0
    max_staleness: int | None = None
    towards_model: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole(f"{_KEY}.buffer", self.buffer, low=1)
        require_choice(f"{_KEY}.discount", self.discount, get_args(Discount))
        require_range(f"{_KEY}.exponent", self.exponent)
        require_range(f"{_KEY}.threshold", self.threshold)
        if self.max_staleness is not None:
            require_whole(f"{_KEY}.max_staleness", self.max_staleness, low=0)

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
