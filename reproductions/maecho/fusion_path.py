"""How an iterated fusion went on, and its neurons (Su et al., MA-Echo, Figures 5 and 6).

A run that has kept its clients' models (checkpoint.client_models) is fused again, and stopped after
ever more iterations. That is done in a process of its own (fedhet/report/fusing.py), for it
takes torch and the test set; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproductions.maecho.decoder_data import CLIENTS

TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class FusionPath:
    """The iterates of a fusion, and the loss on the plane of its first two steps.

    Args:
        iterations: after how many of them it was looked at, from 0 on.
        accuracy: of each iterate, on the test set; empty where the model does not classify.
        loss: of each iterate, on the test set.
        path: (x, y) of each iterate in the plane, the nearest point to it; the first three lie in
            the plane.
        in_plane: the share of the way from the first iterate to each that lies in the plane, of its
            squared length; of all but the first together.
        x: of the grid.
        y: of the grid.
        surface: the loss at (y, x), on the first ``examples`` of the test set.
        examples: how many.
        error: why there is nothing of all that.
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
        points: (x, y) of every neuron, client after client, of a t-SNE of the weights' rows.
        matched: the share of the other clients' neurons that are nearest to the first client's
            neuron of the same number.
        accuracy: of the clients' models on their own examples, the mean; None without any.
    """

    title: str
    points: Sequence[Sequence[float]]
    matched: float
    accuracy: float | None


@dataclass(frozen=True)
class Neurons:
    """The neurons of a layer, before a fusion and in it.

    Args:
        layer: the name of its weight.
        clients: how many.
        count: how many neurons each has, the first ones of the layer.
        stages: as mappings of :class:`Stage`.
    """

    layer: str
    clients: int
    count: int
    stages: Sequence[Mapping[str, Any]]


def can_fuse_again(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a classifier's run has an iterated fusion, and kept what its clients sent."""
    iterated = str(settings.get("strategy.aggregator._target_")).startswith("strategies.maecho.")
    return iterated and settings.get("task.model") != "cvae" and (folder / CLIENTS).is_file()


def fuse_again(folder: Path) -> tuple[FusionPath | None, Neurons | None]:
    """Return how a run's fusion went on, and its neurons; None where it does not iterate so."""
    # The report is about what is there: it downloads nothing.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "reproductions.maecho.replay_fusion", str(folder)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, **offline},
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return FusionPath(error=f"fusing again took longer than {TIMEOUT_SECONDS} s"), None
    except (ValueError, IndexError):
        return FusionPath(error=f"fusing again failed: {done.stderr.strip()[-300:]}"), None
    path, neurons = answer["fusion"], answer["neurons"]
    return path and FusionPath(**path), neurons and Neurons(**neurons)
