"""Repeated seeded splits: coverage and mean size of one model's sets, at many levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tasks.conformal.scores import (
    Array,
    Labels,
    Score,
    coverage_and_size,
    fit_temperature,
    of_labels,
    probabilities_of,
    quantile,
)
from tasks.conformal.sketch import Client, Grid, shared_quantile, shared_temperature

LEVELS = 20  # of the curve, beside the one that is asked for
LOWEST = 0.02


@dataclass(frozen=True)
class Outputs:
    """What a model says of n examples: logits (n, C) and labels (n,)."""

    logits: Array
    labels: Labels

    @property
    def accuracy(self) -> float:
        """Top-1, in [0, 1]."""
        return float((self.logits.argmax(axis=1) == self.labels).mean())


@dataclass(frozen=True)
class Plan:
    """How to split.

    Args:
        splits: how many.
        seed: of the splits, and of the scores' uniform numbers.
        temperature_share: of the examples set apart for calibration, those that the temperature is
            fitted to: the others' scores must not depend on themselves through it.
    """

    splits: int
    seed: int = 0
    temperature_share: float = 0.2


@dataclass(frozen=True)
class Measured:
    """What the splits gave.

    Args:
        levels: a, ascending.
        coverage: (splits, levels).
        size: mean sizes of the sets, (splits, levels).
        temperature: the mean over the splits.
        calibration: how many examples' scores made the quantile.
        evaluation: how many examples' sets were counted.
    """

    levels: Sequence[float]
    coverage: list[list[float]] = field(default_factory=list)
    size: list[list[float]] = field(default_factory=list)
    temperature: float = 1.0
    calibration: int = 0
    evaluation: int = 0

    def at(self, alpha: float) -> tuple[list[float], list[float]]:
        """Return coverage and mean size of every split at one of the levels."""
        place = list(self.levels).index(alpha)
        return [row[place] for row in self.coverage], [row[place] for row in self.size]


def levels_for(accuracy: float, alpha: float) -> list[float]:
    """Return levels from LOWEST to 1 - top-1, where sets have about one class, and alpha."""
    highest = max(1 - accuracy, alpha, 2 * LOWEST)
    grid = np.linspace(LOWEST, highest, LEVELS)
    return sorted({alpha, *(round(float(level), 4) for level in grid)})


def on_test_set(outputs: Outputs, score: Score, levels: Sequence[float], plan: Plan) -> Measured:
    """Calibrate on a random half of the test set, and count on the other; several times."""
    count = len(outputs.labels)
    half = count // 2
    fitting = int(plan.temperature_share * half)
    coverage, sizes, temperatures = [], [], []
    for number in range(plan.splits):
        random = np.random.default_rng([plan.seed, number])
        order, uniform = random.permutation(count), random.random(count)
        fit, calibration, rest = order[:fitting], order[fitting:half], order[half:]
        temperature = 1.0
        if fitting:
            temperature = fit_temperature(outputs.logits[fit], outputs.labels[fit])
        scores = score(probabilities_of(outputs.logits, temperature), uniform)
        own = of_labels(scores[calibration], outputs.labels[calibration])
        pairs = [
            coverage_and_size(scores[rest], outputs.labels[rest], quantile(own, level))
            for level in levels
        ]
        coverage.append([covered for covered, _ in pairs])
        sizes.append([size for _, size in pairs])
        temperatures.append(temperature)
    return Measured(
        levels, coverage, sizes, float(np.mean(temperatures)), half - fitting, count - half
    )


def at_clients(
    held_out: Sequence[Outputs],
    test: Outputs,
    score: Score,
    levels: Sequence[float],
    plan: Plan,
    grid: Grid,
) -> tuple[Measured, Measured]:
    """Calibrate at the clients on what they hold out, and count on the test set; several times.

    Returns:
        with the quantile of the clients' histograms, and with that of their scores themselves,
        which they would have to send for it.
    """
    found: tuple[list[list[tuple[float, float]]], ...] = ([], [])
    temperatures, calibration = [], 0
    for number in range(plan.splits):
        clients = [_client(outputs, plan, number, place) for place, outputs in enumerate(held_out)]
        temperature = 1.0
        if plan.temperature_share:
            temperature = shared_temperature([client.log_losses() for client in clients])
        sketches = [client.sketch(score, temperature, grid) for client in clients]
        pooled = np.concatenate([client.scores(score, temperature) for client in clients])
        uniform = np.random.default_rng([plan.seed, number]).random(len(test.labels))
        scores = score(probabilities_of(test.logits, temperature), uniform)
        for rows, thresholds in (
            (found[0], [shared_quantile(sketches, grid, level) for level in levels]),
            (found[1], [quantile(pooled, level) for level in levels]),
        ):
            rows.append([coverage_and_size(scores, test.labels, q) for q in thresholds])
        temperatures.append(temperature)
        calibration = len(pooled)
    shared, exact = (
        Measured(
            levels,
            [[covered for covered, _ in row] for row in rows],
            [[size for _, size in row] for row in rows],
            float(np.mean(temperatures)),
            calibration,
            len(test.labels),
        )
        for rows in found
    )
    return shared, exact


def _client(outputs: Outputs, plan: Plan, number: int, place: int) -> Client:
    """Return a client with its own split, of its own seed."""
    random = np.random.default_rng([plan.seed, number, place + 1])
    count = len(outputs.labels)
    fitting = random.permutation(count) < round(plan.temperature_share * count)
    return Client(outputs.logits, outputs.labels, fitting, random.random(count))
