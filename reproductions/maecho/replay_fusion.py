"""Fuses the clients' models of a run again (``python -m reproductions.maecho.replay_fusion RUN``).

The plane is the paper's, that of the first two steps: of g_0, g_1 and g_2, where g_t has all
parameters after t iterations in one row. Later iterates are projected onto it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate
from torch import Tensor

from common.errors import ConfigError
from fedhet.load_run import recipe_of, task_of
from reproductions.maecho.decoder_data import CLIENTS
from reproductions.maecho.flat_model import Measured, flat
from reproductions.maecho.fusion_path import FusionPath, Neurons
from reproductions.maecho.neuron_matching import neurons
from strategies.base import Reply, Tensors
from strategies.maecho import HarmonizedOptima
from strategies.round.client_snapshots import load_replies
from tasks import Task

GRID = 21  # points on a side
EXAMPLES = 2000  # of the test set, for the surface
MARGIN = 0.2  # of the side, beyond all that is shown
DENSE = 6  # every iteration until that one, then ever fewer
DIGITS = 5


@dataclass(frozen=True)
class Fusion:
    """A run's fusion, as it was.

    Args:
        task: of the run.
        aggregator: which fused.
        params: x.
        sent: the clients' replies as they came.
        replies: as the aggregator got them.
    """

    task: Task
    aggregator: HarmonizedOptima
    params: Tensors
    sent: Sequence[Reply]
    replies: Sequence[Reply]


def read_fusion(folder: Path) -> Fusion | None:
    """Return the fusion of a run that has kept its clients' models; None if it does not iterate."""
    recipe = recipe_of(folder)
    aggregator = instantiate(recipe.strategy.aggregator, _convert_="all")
    params, sent = load_replies(folder / CLIENTS)
    if not isinstance(aggregator, HarmonizedOptima) or len(sent) < 2:
        return None
    replies: Sequence[Reply] = sent
    for _, transform in sorted(instantiate(recipe.strategy.transforms, _convert_="all").items()):
        replies = transform(params, replies)
    return Fusion(task_of(recipe), aggregator, params, sent, replies)


def fusion_path(fusion: Fusion, grid: int = GRID, examples: int = EXAMPLES) -> FusionPath:
    """Return how a fusion went on.

    Args:
        fusion: of a run.
        grid: points on a side of the surface.
        examples: of the test set, for the surface.

    Raises:
        ConfigError: where the test set cannot be had.
    """
    params = fusion.params
    iterations = looked_at(fusion.aggregator.iterations)
    iterates = torch.stack([flat(fused(fusion, count)) for count in iterations])
    batches = list(fusion.task.test_data().batches(500, generator=None, train=False))
    measured = Measured(fusion.task.build_model(0), params, batches, fusion.task.loss)
    scores = [measured.score(iterate) for iterate in iterates]
    first, second = (iterates[min(count, len(iterates) - 1)] for count in (1, 2))
    plane = Plane.through(iterates[0], first, second)
    path = plane.coordinates(iterates)
    x, y = _axes(path, grid)
    surface = [[measured.loss(plane.point(a, b), examples) for a in x] for b in y]
    accuracies = [accuracy for _, accuracy in scores if accuracy is not None]
    return FusionPath(
        iterations,
        _rounded(accuracies),
        _rounded([loss for loss, _ in scores]),
        [_rounded(point) for point in path.tolist()],
        _rounded([plane.share(iterates[1:] - iterates[0])])[0],
        _rounded(x),
        _rounded(y),
        [_rounded(row) for row in surface],
        measured.count(examples),
    )


def looked_at(last: int) -> list[int]:
    """Return after how many iterations to look: 0, 1, 2 ..., then ever fewer, and the last."""
    found, step = [0], 1.0
    while found[-1] < last:
        step = 1.0 if found[-1] < DENSE else step * 1.3
        found.append(min(last, found[-1] + round(step)))
    return found


def fused(fusion: Fusion, iterations: int) -> dict[str, Tensor]:
    """Return what comes out had the aggregator stopped after so many iterations."""
    stopped = copy.copy(fusion.aggregator)
    stopped.iterations = iterations
    changes = stopped(fusion.params, fusion.replies)
    return {name: x + changes[name] for name, x in fusion.params.items()}


@dataclass(frozen=True)
class Plane:
    """Through three models (d,); ``first`` and ``second`` are orthogonal and of length 1."""

    origin: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def through(cls, one: Tensor, other: Tensor, third: Tensor) -> Plane:
        """Return the plane, its first axis from ``one`` to ``other``."""
        first = _unit(other - one)
        beside = third - one
        return cls(one, first, _unit(beside - (beside @ first) * first))

    def coordinates(self, models: Tensor) -> Tensor:
        """Return (x, y) of the points nearest to models (n, d)."""
        found: Tensor = (models - self.origin) @ torch.stack([self.first, self.second], dim=1)
        return found

    def point(self, x: float, y: float) -> Tensor:
        """Return the model (d,) there."""
        return self.origin + x * self.first + y * self.second

    def share(self, ways: Tensor) -> float:
        """Return how much of the squared length of ways (n, d) lies in the plane."""
        inside = (ways @ torch.stack([self.first, self.second], dim=1)).square().sum()
        return float(inside / ways.square().sum().clamp_min(1e-30))


def _unit(way: Tensor) -> Tensor:
    found: Tensor = way / way.norm().clamp_min(1e-30)
    return found


def _axes(points: Tensor, grid: int) -> tuple[list[float], list[float]]:
    """Return x and y of a square grid around points (n, 2)."""
    low, high = points.min(0).values, points.max(0).values
    half = (0.5 + MARGIN) * float((high - low).max().clamp_min(1e-12))
    offsets = torch.linspace(-half, half, grid).double()
    x, y = ((middle + offsets).tolist() for middle in (low + high) / 2)
    return x, y


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


def main() -> None:
    """Print the path and the neurons of the run that the command line names, or null."""
    logging.getLogger("flwr").setLevel(logging.ERROR)  # it fuses dozens of times
    path: FusionPath | None
    matching: Neurons | None = None
    try:
        fusion = read_fusion(Path(sys.argv[1]))
        path = None if fusion is None else fusion_path(fusion)
        if fusion is not None:
            matching = neurons(
                fusion.task, fusion.aggregator, fusion.params, fusion.sent, fusion.replies
            )
    except (ConfigError, OSError) as error:
        path = FusionPath(error=str(error))
    found = {"fusion": path, "neurons": matching}
    print(json.dumps({n: v and dataclasses.asdict(v) for n, v in found.items()}))


if __name__ == "__main__":
    main()
