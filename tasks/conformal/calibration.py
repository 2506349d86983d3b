"""Prediction sets that several clients calibrate: what they are asked, and what follows.

A client first answers with its log losses at the temperatures of a grid, then with histograms of
its scores at the temperature that fits all clients best (sketch.py). A run asks by messages
(server_app/listeners/calibration.py), ``fedhet-conformal`` asks clients in its own process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedhet.tasks.conformal.scores import Array
from fedhet.tasks.conformal.sketch import (
    BINS,
    Counts,
    grids_for,
    shared_quantile,
    shared_temperature,
)


@dataclass(frozen=True)
class Calibration:
    """Which prediction sets to calibrate.

    Args:
        alphas: a set must hold the right class in 1 - alpha of all cases; each in (0, 1).
        bins: of a client's histogram of scores.
        temperature_share: share of the held-out examples that fits the temperature.
    """

    alphas: Sequence[float] = ()
    bins: int = BINS
    temperature_share: float = 0.2

    def temperature(self, losses: Sequence[Array]) -> float:
        """Return the temperature that fits the clients' log losses best; 1 where none is fitted."""
        return shared_temperature(losses) if self.temperature_share else 1.0

    def thresholds(
        self, histograms: Sequence[Mapping[str, Counts]], classes: int
    ) -> dict[str, list[float]]:
        """Return q' for each alpha, by the score's name, from the clients' histograms.

        It is infinite where there are too few examples for an alpha: every class is in the set.
        """
        return {
            score.name: [
                shared_quantile([one[score.name] for one in histograms], grid, alpha)
                for alpha in self.alphas
            ]
            for score, grid in grids_for(classes, self.bins).items()
        }
