"""The data of a replayed fusion: its path and its neurons (MA-Echo, Figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhet.report.run_data import Run


@dataclass(frozen=True)
class FusionPath:
    """The iterates of a fusion, and the loss on the plane of its first two steps."""

    iterations: Sequence[int] = ()  # their numbers, from 0 on
    accuracy: Sequence[float] = ()  # on the test set; empty if the model does not classify
    loss: Sequence[float] = ()  # on the test set
    path: Sequence[Sequence[float]] = ()  # (x, y) in the plane nearest to each iterate
    in_plane: float = 1.0  # share of the squared distances from the first iterate
    x: Sequence[float] = ()  # of the grid
    y: Sequence[float] = ()
    surface: Sequence[Sequence[float]] = ()  # the loss at (y, x), on the first test examples
    examples: int = 0  # of the surface
    error: str = ""  # why there is no path


@dataclass(frozen=True)
class Stage:
    """The neurons of all clients at one time."""

    title: str
    points: Sequence[Sequence[float]]  # (x, y) of every neuron by client: a t-SNE of the rows
    # share of the other clients' neurons that are nearest to the first client's neuron of the same
    # number
    matched: float
    accuracy: float | None  # the mean of the clients' models on their own examples


@dataclass(frozen=True)
class FusedNeurons:
    """The neurons of a layer, before a fusion and during it."""

    layer: str  # the name of its weight
    clients: int
    count: int  # neurons per client, the first ones of the layer
    stages: Sequence[Stage]


def fusion_path_of(run: Run) -> FusionPath | None:
    """Return the path that was collected of a run."""
    found = run.figures.get("maecho", {}).get("fusion")
    return FusionPath(**found) if found else None


def neurons_of(run: Run) -> FusedNeurons | None:
    """Return the neurons that were collected of a run."""
    found = run.figures.get("maecho", {}).get("neurons")
    if not found:
        return None
    return FusedNeurons(**{**found, "stages": [Stage(**stage) for stage in found["stages"]]})
