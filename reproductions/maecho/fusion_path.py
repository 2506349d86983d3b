"""The data of a replayed fusion: its path and its neurons (MA-Echo, Figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhet.report.run_data import Run


@dataclass(frozen=True)
class FusionPath:
    """The iterates of a fusion, and the loss on the plane of its first two steps.

    Args:
        iterations: their numbers, from 0 on.
        accuracy: of each iterate, on the test set; empty if the model does not classify.
        loss: of each iterate, on the test set.
        path: (x, y) of the nearest point to each iterate in the plane; the first three lie in it.
        in_plane: share of the squared distances from the first iterate that lies in the plane.
        x: of the grid.
        y: of the grid.
        surface: the loss at (y, x), on the first ``examples`` of the test set.
        examples: their number.
        error: why there is no path.
    """

    iterations: Sequence[int] = ()
    accuracy: Sequence[float] = ()
    loss: Sequence[float] = ()
    path: Sequence[Sequence[float]] = ()
    in_plane: float = 1.0
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    surface: Sequence[Sequence[float]] = ()
    examples: int = 0
    error: str = ""


@dataclass(frozen=True)
class Stage:
    """The neurons of all clients at one time.

    Args:
        title: of the stage.
        points: (x, y) of every neuron, client after client: a t-SNE of the weights' rows.
        matched: share of the other clients' neurons that are nearest to the first client's neuron
            of the same number.
        accuracy: of the clients' models on their own examples, the mean; None if unknown.
    """

    title: str
    points: Sequence[Sequence[float]]
    matched: float
    accuracy: float | None


@dataclass(frozen=True)
class Neurons:
    """The neurons of a layer, before a fusion and during it.

    Args:
        layer: name of its weight.
        clients: N.
        count: number of neurons per client, the first ones of the layer.
        stages: in their order.
    """

    layer: str
    clients: int
    count: int
    stages: Sequence[Stage]


def fusion_path_of(run: Run) -> FusionPath | None:
    """Return the path that was collected of a run."""
    found = run.figures.get("maecho", {}).get("fusion")
    return FusionPath(**found) if found else None


def neurons_of(run: Run) -> Neurons | None:
    """Return the neurons that were collected of a run."""
    found = run.figures.get("maecho", {}).get("neurons")
    if not found:
        return None
    return Neurons(**{**found, "stages": [Stage(**stage) for stage in found["stages"]]})
