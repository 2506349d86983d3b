"""Centred clipping, and a bound on the updates' norm.

Centred clipping    Karimireddy, He, Jaggi. ICML 2021. https://arxiv.org/abs/2012.10333
Norm bound          Sun, Kairouz, Suresh, McMahan. 2019. https://arxiv.org/abs/1911.07963
its quantile        Andrew, Thakkar, McMahan, Ramaswamy. NeurIPS 2021. https://arxiv.org/abs/1905.03871

    centred clipping    v <- v + (1 / n) sum_i (u_i - v) min(1, tau / ||u_i - v||)
    norm bound          (1 / n) sum_i u_i min(1, C / ||u_i||)

v is the last round's aggregate, at first zero, and stays from round to round; the authors let
clients send momenta, which this does not change. For buffers v is zero in every round, so the
result is a mean of the sent and the returned values; another v could move a variance below zero. A
given tau or C applies to the updates. Without one, and for payloads and buffers, whose scales
differ, tau is the median of the round's ||u_i - v||, and C starts at a quantile of the first
round's norms and follows it by

    C <- C exp(-eta (b - gamma)),   b the share of vectors that were not longer than C

Once v and C are known, these rules need one reply at a time; the server keeps all replies anyway,
because a payload's rule needs all norms of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedhet.common.kinds import Count, Positive, Share
from fedhet.strategies.base import Payloads, Tensors, subtract, zeros_like
from fedhet.strategies.modes.private.clipping import AdaptiveNorm
from fedhet.strategies.modes.robust.aggregator import (
    BUFFERS,
    UPDATE,
    Combined,
    RobustAggregator,
    weighted_mean,
)
from fedhet.strategies.round.update_diagnostics import norm

_CENTRE = "centre:"  # begins the names of the state's groups
_BOUNDS = "bounds"


class CenteredClipping(RobustAggregator):
    """The last aggregate, moved by the mean of the clipped differences to it."""

    option = "centered_clipping"

    radius: Positive | None = None
    """tau, how far an update may be from the centre; null: the round's median distance"""
    iterations: Count = 1
    """iterations of clipping per round"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.centres: dict[str, dict[str, Tensor]] = {}

    def mean(self, group: str, vectors: Sequence[Tensors]) -> Combined:
        """Return the mean; keep it as the next round's centre, except for buffers."""
        kept = {} if group == BUFFERS else self.centres.get(group)
        centre = kept or zeros_like(vectors[0])
        factors = [1.0] * len(vectors)
        for _ in range(self.iterations):
            lengths = [norm(subtract(vector, centre)) for vector in vectors]
            fixed = self.radius if group == UPDATE else None
            radius = _quantile(lengths, 0.5) if fixed is None else fixed
            factors = [_factor(length, radius) for length in lengths]
            shares = [factor / len(vectors) for factor in factors]
            centre = weighted_mean([*vectors, centre], [*shares, 1.0 - sum(shares)])
        if group != BUFFERS:
            self.centres[group] = centre
        return centre, factors

    def state_dict(self) -> Payloads:
        """Return the centres."""
        return {f"{_CENTRE}{group}": centre for group, centre in self.centres.items()}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore them."""
        self.centres = {name.removeprefix(_CENTRE): dict(one) for name, one in state.items()}


class NormBound(RobustAggregator):
    """The mean of the updates, none of them longer than a bound."""

    option = "norm_bound"

    bound: Positive | None = None
    """C, the longest an update may be; null: it follows the quantile"""
    quantile: Share = 0.5
    """gamma, the share of updates that should not be shortened"""
    lr: Positive = 0.2
    """eta, how fast C follows: C <- C exp(-eta (share - gamma)) each round"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.bounds: dict[str, float] = {}  # by group, those that follow the quantile

    def mean(self, group: str, vectors: Sequence[Tensors]) -> Combined:
        """Return the mean, and move the bound."""
        lengths = [norm(vector) for vector in vectors]
        fixed = self.bound if group == UPDATE else None
        bound = self._moved(group, lengths) if fixed is None else fixed
        factors = [_factor(length, bound) for length in lengths]
        return weighted_mean(vectors, [factor / len(vectors) for factor in factors]), factors

    def _moved(self, group: str, lengths: Sequence[float]) -> float:
        """Return the bound of this round; keep the next one's."""
        bound = self.bounds.get(group) or _quantile(lengths, self.quantile)
        if bound > 0.0:
            following = AdaptiveNorm(bound, self.quantile, self.lr, count_stddev=None)
            unclipped = sum(length <= bound for length in lengths)
            following.move(unclipped, len(lengths), len(lengths), None)
            self.bounds[group] = following.value
        return bound

    def state_dict(self) -> Payloads:
        """Return the bounds."""
        bounds = {g: torch.tensor(one, dtype=torch.float64) for g, one in self.bounds.items()}
        return {_BOUNDS: bounds} if bounds else {}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore them."""
        self.bounds = {group: float(one) for group, one in state[_BOUNDS].items()}


def _factor(length: float, bound: float) -> float:
    return 1.0 if length <= bound else bound / length


def _quantile(lengths: Sequence[float], share: float) -> float:
    return float(torch.tensor(lengths, dtype=torch.float64).quantile(share))
