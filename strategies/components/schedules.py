"""Learning-rate schedules: the factor of ``local.lr`` in a round, constant within the round."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedhet.common.configured import Option
from fedhet.common.kinds import Inside, Share, ShareAboveZero


class _Schedule(Option):
    group = "schedule"


class Constant(_Schedule):
    """The same learning rate in all rounds: factor 1."""

    option = "constant"

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        return 1.0


class ExponentialDecay(_Schedule):
    """A factor a round: decay ** (t - 1); FedMRUR uses decay .998."""

    option = "exponential"

    decay: ShareAboveZero = 0.998
    """factor a round"""

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        return self.decay ** (round - 1)


class Cosine(_Schedule):
    """Half a cosine over the rounds: floor + (1 - floor) * (1 + cos(pi (t - 1) / T)) / 2, T =
    num_rounds.
    """

    option = "cosine"

    floor: Share = 0.0
    """what the factor falls towards"""

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        wave = (1.0 + math.cos(math.pi * (round - 1) / num_rounds)) / 2.0
        return self.floor + (1.0 - self.floor) * wave


class MultiStep(_Schedule):
    """A factor at each milestone: decay ** (number of milestones passed)."""

    option = "multi_step"

    milestones: Sequence[Inside] = (0.5, 0.75)
    """fractions of rounds"""
    decay: ShareAboveZero = 0.1
    """factor at each milestone"""

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        passed = sum(round - 1 >= milestone * num_rounds - 1e-9 for milestone in self.milestones)
        return self.decay**passed
