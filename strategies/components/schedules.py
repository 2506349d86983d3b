"""Learning-rate schedules: the factor of ``local.lr`` in a round, constant within the round."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedhet.common.errors import ConfigError, require_range


class Constant:
    """Factor 1."""

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        return 1.0


class ExponentialDecay:
    """decay ** (t - 1); FedMRUR uses decay .998."""

    def __init__(self, decay: float = 0.998) -> None:
        self.decay = require_range("schedule.decay", decay, high=1.0, open_low=True)

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        return self.decay ** (round - 1)


class Cosine:
    """floor + (1 - floor) * (1 + cos(pi (t - 1) / T)) / 2, T = num_rounds."""

    def __init__(self, floor: float = 0.0) -> None:
        self.floor = require_range("schedule.floor", floor, high=1.0)

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        wave = (1.0 + math.cos(math.pi * (round - 1) / num_rounds)) / 2.0
        return self.floor + (1.0 - self.floor) * wave


class MultiStep:
    """decay ** (number of milestones passed); milestones are fractions of num_rounds."""

    def __init__(self, milestones: Sequence[float] = (0.5, 0.75), decay: float = 0.1) -> None:
        if not all(0.0 < milestone < 1.0 for milestone in milestones):
            raise ConfigError(
                f"schedule.milestones={list(milestones)} is not allowed: "
                "each is a fraction of rounds and must lie in (0, 1)"
            )
        self.milestones = tuple(milestones)
        self.decay = require_range("schedule.decay", decay, high=1.0, open_low=True)

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor."""
        passed = sum(round - 1 >= milestone * num_rounds - 1e-9 for milestone in self.milestones)
        return self.decay**passed
