"""The sets of one finished run's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from common.errors import ConfigError
from fedhet.load_run import classifier_of, recipe_of, task_of
from fedhet.tools.conformal.splits import (
    Measured,
    Outputs,
    Plan,
    at_clients,
    levels_for,
    on_test_set,
)
from tasks import Task
from tasks.conformal.scores import Score, scores_for
from tasks.conformal.sketch import Grid
from tasks.evaluation import logits_of


@dataclass(frozen=True)
class Options:
    """What to measure.

    Args:
        alpha: 1 - alpha is to be covered.
        splits: how many.
        seed: of the splits.
        temperature_share: of the calibration examples, those for the temperature.
        federated: at the clients, too.
        bins: of their histograms.
    """

    alpha: float = 0.1
    splits: int = 20
    seed: int = 0
    temperature_share: float = 0.2
    federated: bool = False
    bins: int = 1000


@dataclass(frozen=True)
class RunSets:
    """The sets of a run's model.

    Args:
        accuracy: top-1 on the test set, in [0, 1].
        centralised: calibrated on half of the test set, by the score's name.
        sketched: calibrated at the clients by their histograms, the same.
        pooled: calibrated by the scores that these histograms are of, the same.
    """

    accuracy: float
    centralised: Mapping[str, Measured]
    sketched: Mapping[str, Measured] = field(default_factory=dict)
    pooled: Mapping[str, Measured] = field(default_factory=dict)


def measure(folder: Path, options: Options) -> RunSets:
    """Measure the sets of a run's model.

    Args:
        folder: of the run.
        options: what to measure.

    Raises:
        ConfigError: where its model or examples cannot be had, or its clients hold none out.
    """
    recipe = recipe_of(folder)
    task = task_of(recipe)
    model = classifier_of(folder, task)
    device = next(model.parameters()).device
    test = Outputs(*logits_of(model, task.test_data(device)))
    plan = Plan(options.splits, options.seed, options.temperature_share)
    levels = levels_for(test.accuracy, options.alpha)
    scores = scores_for(task.num_classes)
    centralised = {score.name: on_test_set(test, score, levels, plan) for score in scores}
    if not options.federated:
        return RunSets(test.accuracy, centralised)
    held_out = _held_out(task, model, folder)
    both = {
        score.name: at_clients(
            held_out, test, score, levels, plan, _grid(score, task, options.bins)
        )
        for score in scores
    }
    return RunSets(
        test.accuracy,
        centralised,
        {name: shared for name, (shared, _) in both.items()},
        {name: exact for name, (_, exact) in both.items()},
    )


def _grid(score: Score, task: Task, bins: int) -> Grid:
    return Grid(score.largest(task.num_classes), bins)


def _held_out(task: Task, model: nn.Module, folder: Path) -> list[Outputs]:
    """Return what the model says of each client's held-out examples."""
    device = next(model.parameters()).device
    found = []
    for client in range(task.num_clients):
        _, own = task.client_data(client, device)
        if own is not None:
            found.append(Outputs(*logits_of(model, own)))
    if not found:
        raise ConfigError(
            f"--federated calibrates on what clients hold out, and in {folder} they hold out "
            f"nothing (partition.holdout={task.partition.holdout}): run it with "
            "partition.holdout=0.1"
        )
    return found
