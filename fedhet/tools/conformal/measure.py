"""Coverage and size of the prediction sets of one finished run's model, over repeated splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn

from fedhet.changed_task import require_same_examples
from fedhet.common.errors import ConfigError
from fedhet.load_run import data_set_task_of, model_of, recipe_of
from fedhet.tasks import Task
from fedhet.tasks.conformal.calibration import Calibration
from fedhet.tasks.conformal.scores import (
    Array,
    Labels,
    Score,
    coverage_and_size,
    fit_temperature,
    of_labels,
    probabilities_of,
    quantile,
    scores_for,
)
from fedhet.tasks.conformal.sketch import HeldOutClient
from fedhet.tasks.evaluation import logits_of

LEVELS = 20  # of the curve, beside the requested one
LOWEST = 0.02
_IN_THE_RUN = "; a run calibrates on such data itself, with calibration.alphas=[0.1]"


@dataclass(frozen=True)
class Options:
    """What to measure.

    The temperature has calibration examples of its own, so that it depends on no counted score.
    """

    alpha: float = 0.1  # the sets are to cover 1 - alpha
    splits: int = 20  # how many
    seed: int = 0  # of the splits and of the scores' uniform numbers
    temperature_share: float = 0.2  # of the calibration examples, those for the temperature
    federated: bool = False  # calibrate at the clients, too
    bins: int = 1000  # of their histograms


@dataclass(frozen=True)
class Outputs:
    """A model's logits (n, C) for n examples, and their labels (n,)."""

    logits: Array
    labels: Labels

    @property
    def accuracy(self) -> float:
        """Top-1, in [0, 1]."""
        return float((self.logits.argmax(axis=1) == self.labels).mean())


@dataclass
class MeasuredSets:
    """Coverage and size of the sets over the splits."""

    levels: Sequence[float]  # a, ascending
    coverage: list[list[float]] = field(default_factory=list)  # (splits, levels)
    size: list[list[float]] = field(default_factory=list)  # mean sizes, (splits, levels)
    temperature: float = 1.0  # the mean over the splits
    calibration: int = 0  # how many examples' scores made the quantile
    evaluation: int = 0  # how many examples' sets were counted

    def add(
        self, scores: Array, labels: Labels, thresholds: Sequence[float], temperature: float
    ) -> None:
        """Count a split: scores (n, C) and labels (n,), with the threshold q of each level."""
        pairs = [coverage_and_size(scores, labels, threshold) for threshold in thresholds]
        self.coverage.append([covered for covered, _ in pairs])
        self.size.append([size for _, size in pairs])
        self.temperature += (temperature - self.temperature) / len(self.coverage)
        self.evaluation = len(labels)

    def at(self, alpha: float) -> tuple[list[float], list[float]]:
        """Return coverage and mean size of every split at one of the levels."""
        place = list(self.levels).index(alpha)
        return [row[place] for row in self.coverage], [row[place] for row in self.size]


@dataclass(frozen=True)
class RunSets:
    """The sets of a run's model, by the score's name."""

    accuracy: float  # top-1 on the test set, in [0, 1]
    centralised: Mapping[str, MeasuredSets]  # calibrated on half of the test set
    sketched: Mapping[str, MeasuredSets] = field(default_factory=dict)  # by the clients' histograms
    pooled: Mapping[str, MeasuredSets] = field(default_factory=dict)  # by the scores behind these


def measure(folder: Path, options: Options) -> RunSets:
    """Measure the sets of the model of the run in a folder."""
    task = data_set_task_of(recipe_of(folder), _IN_THE_RUN)
    require_same_examples(folder, task, train=options.federated)
    model = model_of(folder, task)
    test = Outputs(*logits_of(model, task.test_data(next(model.parameters()).device)))
    levels = levels_for(test.accuracy, options.alpha)
    centralised = on_test_set(test, levels, options)
    if not options.federated:
        return RunSets(test.accuracy, centralised)
    held_out = _held_out(task, model, folder)
    return RunSets(test.accuracy, centralised, *at_clients(held_out, test, levels, options))


def levels_for(accuracy: float, alpha: float) -> list[float]:
    """Return levels from LOWEST to 1 - top-1, where sets have about one class, and alpha."""
    highest = max(1 - accuracy, alpha, 2 * LOWEST)
    grid = np.linspace(LOWEST, highest, LEVELS)
    return sorted({alpha, *(round(float(level), 4) for level in grid)})


def on_test_set(
    test: Outputs, levels: Sequence[float], options: Options
) -> dict[str, MeasuredSets]:
    """Calibrate on a random half of the test set, and count the other half, for each split."""
    count = len(test.labels)
    half = count // 2
    fitting = int(options.temperature_share * half)
    found = _nothing_yet(test, levels, half - fitting)
    for number in range(options.splits):
        random = np.random.default_rng([options.seed, number])
        order, uniform = random.permutation(count), random.random(count)
        fit, calibration, rest = order[:fitting], order[fitting:half], order[half:]
        temperature = fit_temperature(test.logits[fit], test.labels[fit]) if fitting else 1.0
        probabilities = probabilities_of(test.logits, temperature)
        for score, measured in found.items():
            scores = score(probabilities, uniform)
            own = of_labels(scores[calibration], test.labels[calibration])
            thresholds = [quantile(own, level) for level in levels]
            measured.add(scores[rest], test.labels[rest], thresholds, temperature)
    return _by_name(found)


def at_clients(
    held_out: Sequence[Outputs], test: Outputs, levels: Sequence[float], options: Options
) -> tuple[dict[str, MeasuredSets], dict[str, MeasuredSets]]:
    """Calibrate on the clients' held-out examples, and count the test set, for each split.

    Returns:
        With the quantile of the clients' histograms, and with that of the scores themselves.
    """
    calibration = Calibration(levels, options.bins, options.temperature_share)
    classes = test.logits.shape[1]
    sketched, pooled = _nothing_yet(test, levels), _nothing_yet(test, levels)
    for number in range(options.splits):
        clients = []
        for place, own in enumerate(held_out):
            random = np.random.default_rng([options.seed, number, place + 1])
            clients.append(
                HeldOutClient.split(own.logits, own.labels, options.temperature_share, random)
            )
        temperature = calibration.temperature([client.log_losses() for client in clients])
        histograms = [client.histograms(temperature, options.bins) for client in clients]
        by_counts = calibration.thresholds(histograms, classes)
        probabilities = probabilities_of(test.logits, temperature)
        uniform = np.random.default_rng([options.seed, number]).random(len(test.labels))
        for score in sketched:
            of_test = score(probabilities, uniform)
            sketched[score].add(of_test, test.labels, by_counts[score.name], temperature)
            scores = np.concatenate([client.scores(score, temperature) for client in clients])
            thresholds = [quantile(scores, level) for level in levels]
            pooled[score].add(of_test, test.labels, thresholds, temperature)
            sketched[score].calibration = pooled[score].calibration = len(scores)
    return _by_name(sketched), _by_name(pooled)


def _nothing_yet(
    test: Outputs, levels: Sequence[float], calibration: int = 0
) -> dict[Score, MeasuredSets]:
    classes = test.logits.shape[1]
    return {score: MeasuredSets(levels, calibration=calibration) for score in scores_for(classes)}


def _by_name(found: Mapping[Score, MeasuredSets]) -> dict[str, MeasuredSets]:
    return {score.name: measured for score, measured in found.items()}


def _held_out(task: Task, model: nn.Module, folder: Path) -> list[Outputs]:
    """Return the model's outputs for each client's held-out examples."""
    device = next(model.parameters()).device
    parts = (task.client_data(client, device)[1] for client in range(task.num_clients))
    found = [Outputs(*logits_of(model, own)) for own in parts if own is not None]
    if not found:
        raise ConfigError(
            f"--federated calibrates on the examples that clients hold out, and in {folder} "
            f"partition.holdout={task.partition.holdout}: run it with partition.holdout=0.1"
        )
    return found
