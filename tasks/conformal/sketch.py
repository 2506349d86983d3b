"""Federated calibration: clients send histograms of their scores, not examples.

A score is rounded up to the next of ``bins`` evenly spaced edges. A client sends the number of its
scores at each edge, four bytes each; the server adds the histograms. The quantile of the rounded
scores, which the sum gives exactly, is

    q <= q' <= q + width        q: of the pooled scores without rounding

so sets with q' cover at least 1 - a, for an example that is exchangeable with the pooled ones, and
exceed those with q by at most the probability of a score between q and q + width.

The temperature is chosen from a fixed grid by the sums of the clients' log losses, on examples that
do not calibrate, because the coverage holds only for scores that are not fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedhet.tasks.conformal.scores import (
    COLDEST,
    HOTTEST,
    Array,
    Labels,
    Score,
    log_loss,
    of_labels,
    probabilities_of,
    rank_of_quantile,
    scores_for,
)

Counts = NDArray[np.uint32]
TEMPERATURES: Array = np.geomspace(COLDEST, HOTTEST, 121)  # 5 % apart
BINS = 1000


@dataclass(frozen=True)
class Grid:
    """Edges that scores are rounded up to; scores above ``largest`` count as infinite."""

    largest: float
    bins: int = BINS

    @cached_property
    def edges(self) -> Array:
        """The edges (bins,), and infinity."""
        steps = np.arange(1, self.bins + 1) / self.bins
        return np.append(self.largest * steps, math.inf)

    @property
    def width(self) -> float:
        """The distance of two edges."""
        return self.largest / self.bins

    def counts(self, scores: Array) -> Counts:
        """Return the number of scores (n,) at each edge and at infinity: (bins + 1,)."""
        places = np.searchsorted(self.edges, scores, side="left")  # the first edge >= the score
        return np.bincount(places, minlength=self.bins + 1).astype(np.uint32)

    def quantile(self, counts: Counts, alpha: float) -> float:
        """Return q' of the summed histograms; infinite if they hold too few scores."""
        below = np.cumsum(counts, dtype=np.int64)
        rank = rank_of_quantile(int(below[-1]), alpha)
        if rank < 1:
            return -math.inf
        return math.inf if rank > below[-1] else float(self.edges[np.searchsorted(below, rank)])


def grids_for(classes: int, bins: int) -> dict[Score, Grid]:
    """Return the scores for a number of classes, each with the grid that it is rounded up to."""
    return {score: Grid(score.largest(classes), bins) for score in scores_for(classes)}


@dataclass(frozen=True)
class HeldOutClient:
    """A client's held-out examples, which stay with it.

    Args:
        logits: of the model, (n, C).
        labels: (n,).
        fitting: which examples fit the temperature, (n,); the others calibrate.
        uniform: a number in [0, 1) for each, (n,).
    """

    logits: Array
    labels: Labels
    fitting: NDArray[np.bool_]
    uniform: Array

    @classmethod
    def split(
        cls, logits: Array, labels: Labels, share: float, random: np.random.Generator
    ) -> Self:
        """Return a client whose examples are randomly split: a share is for the temperature."""
        count = len(labels)
        fitting = random.permutation(count) < round(share * count)
        return cls(logits, labels, fitting, random.random(count))

    def log_losses(self) -> Array:
        """Return the sum of the log losses at every temperature of the grid, which is sent."""
        logits, labels = self.logits[self.fitting], self.labels[self.fitting]
        if not len(labels):
            return np.zeros(len(TEMPERATURES))
        return np.array([len(labels) * log_loss(logits, labels, float(t)) for t in TEMPERATURES])

    def scores(self, score: Score, temperature: float) -> Array:
        """Return the labels' scores of the calibrating examples, which are not sent."""
        kept = ~self.fitting
        probabilities = probabilities_of(self.logits[kept], temperature)
        return of_labels(score(probabilities, self.uniform[kept]), self.labels[kept])

    def histograms(self, temperature: float, bins: int) -> dict[str, Counts]:
        """Return the histogram of each score's values, by its name, which is sent."""
        grids = grids_for(self.logits.shape[1], bins)
        return {s.name: grid.counts(self.scores(s, temperature)) for s, grid in grids.items()}


def shared_temperature(losses: Sequence[Array]) -> float:
    """Return the temperature with the least sum of the clients' losses; 1 without examples."""
    total = np.sum(losses, axis=0)
    return float(TEMPERATURES[int(np.argmin(total))]) if np.any(total) else 1.0


def shared_quantile(sketches: Sequence[Counts], grid: Grid, alpha: float) -> float:
    """Return q' of the clients' histograms."""
    return grid.quantile(np.sum(sketches, axis=0), alpha)


def bytes_up(grid: Grid) -> int:
    """Return the bytes that a client sends: its log losses and its histogram."""
    return int(TEMPERATURES.nbytes + (grid.bins + 1) * np.dtype(np.uint32).itemsize)


def bytes_down() -> int:
    """Return the bytes that it receives beside the model: the temperature and q'."""
    return 2 * np.dtype(np.float64).itemsize
