"""Replays a run's fusion of its clients' models, stopped after more and more iterations.

A process of its own: ``echo '"RUN"' | python -m fedhet.reproductions.maecho.replay_fusion``. The
plane is the paper's, through g_0, g_1 and g_2, where g_t holds all parameters after t iterations.
Later iterates are projected onto it.
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
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.conf.build import strategy_parts
from fedhet.load_run import data_set_task_of, recipe_of
from fedhet.reproductions.maecho.decoder_data import CLIENTS
from fedhet.reproductions.maecho.flat_model import Batches, flat, unflat
from fedhet.reproductions.maecho.fusion_path import FusionPath
from fedhet.reproductions.maecho.neuron_matching import Fusion, neurons
from fedhet.strategies.base import Reply
from fedhet.strategies.maecho import HarmonizedOptima
from fedhet.strategies.round.client_snapshots import load_replies
from fedhet.tasks.evaluation import evaluate_model

GRID = 21  # points on a side
EXAMPLES = 2000  # of the test set, for the surface
MARGIN = 0.2  # of the side, around the path
DENSE = 6  # every iteration up to this one is kept, then fewer and fewer
DIGITS = 5


def read_fusion(folder: Path) -> Fusion | None:
    """Return the fusion of a run with its clients' models; None if it does not iterate."""
    recipe = recipe_of(folder)
    task = data_set_task_of(recipe)
    parts = strategy_parts(recipe, task.classifier_tensors)
    params, sent = load_replies(folder / CLIENTS)
    if not isinstance(parts.aggregator, HarmonizedOptima) or len(sent) < 2:
        return None
    replies: Sequence[Reply] = sent
    for _, transform in sorted(parts.transforms.items()):
        replies = transform(params, replies)
    return Fusion(task, parts.aggregator, params, sent, replies)


def fusion_path(fusion: Fusion, grid: int = GRID, examples: int = EXAMPLES) -> FusionPath:
    """Return the iterates of a fusion, and the loss on their plane.

    The surface has ``grid`` points on a side, on so many examples of the test set.

    Raises:
        ConfigError: if the test set is not available.
    """
    iterations = kept_iterations(fusion.aggregator.iterations)
    iterates = torch.stack([flat(fused(fusion, count)) for count in iterations])
    task = fusion.task
    batches = list(task.test_data().batches(500, generator=None, train=False))
    every, few = Batches(batches), Batches(batches[: max(1, examples // len(batches[0][1]))])
    model = task.build_model(0)

    def score(row: Tensor, data: Batches) -> tuple[float, float | None]:
        model.load_state_dict(unflat(row, fusion.params), strict=False)
        return evaluate_model(model, data, task.loss)

    scores = [score(iterate, every) for iterate in iterates]
    plane = Plane.through(*(iterates[min(n, len(iterates) - 1)] for n in range(3)))
    path = plane.coordinates(iterates)
    x, y = _axes(path, grid)
    surface = [[score(plane.point(a, b), few)[0] for a in x] for b in y]
    return FusionPath(
        iterations,
        _rounded([accuracy for _, accuracy in scores if accuracy is not None]),
        _rounded([loss for loss, _ in scores]),
        [_rounded(point) for point in path.tolist()],
        _rounded([plane.share(iterates[1:] - iterates[0])])[0],
        _rounded(x),
        _rounded(y),
        [_rounded(row) for row in surface],
        len(few),
    )


def kept_iterations(last: int) -> list[int]:
    """Return the iterations that are kept: 0, 1, 2 ..., then fewer and fewer, and the last."""
    found, step = [0], 1.0
    while found[-1] < last:
        step = 1.0 if found[-1] < DENSE else step * 1.3
        found.append(min(last, found[-1] + round(step)))
    return found


def fused(fusion: Fusion, iterations: int) -> dict[str, Tensor]:
    """Return the fused model after so many iterations."""
    stopped = copy.copy(fusion.aggregator)
    stopped.iterations = iterations
    changes = stopped(fusion.params, fusion.replies)
    return {name: x + changes[name] for name, x in fusion.params.items()}


@dataclass(frozen=True)
class Plane:
    """The plane through three models (d,), with orthonormal axes (d, 2)."""

    origin: Tensor
    axes: Tensor

    @classmethod
    def through(cls, one: Tensor, other: Tensor, third: Tensor) -> Plane:
        """Return the plane; its first axis points from ``one`` to ``other``."""
        first = _unit(other - one)
        rest = third - one
        return cls(one, torch.stack([first, _unit(rest - (rest @ first) * first)], dim=1))

    def coordinates(self, models: Tensor) -> Tensor:
        """Return (x, y) of the points nearest to models (n, d)."""
        found: Tensor = (models - self.origin) @ self.axes
        return found

    def point(self, x: float, y: float) -> Tensor:
        """Return the model (d,) at (x, y)."""
        return self.origin + x * self.axes[:, 0] + y * self.axes[:, 1]

    def share(self, directions: Tensor) -> float:
        """Return the share of the squared lengths of directions (n, d) that lies in the plane."""
        inside = (directions @ self.axes).square().sum()
        return float(inside / directions.square().sum().clamp_min(1e-30))


def _unit(direction: Tensor) -> Tensor:
    found: Tensor = direction / direction.norm().clamp_min(1e-30)
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
    """Print path and neurons of the run whose folder is on standard input, as JSON."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found: dict[str, object] = {}
    try:
        if (fusion := read_fusion(Path(json.load(sys.stdin)))) is not None:
            found["fusion"] = dataclasses.asdict(fusion_path(fusion))
            if (matching := neurons(fusion)) is not None:
                found["neurons"] = dataclasses.asdict(matching)
    except (ConfigError, OSError) as error:
        found = {"fusion": {"error": str(error)}}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
