"""Reads how a run's classes relate, and the norms of its clients' own heads.

SL is the global soft-label matrix (eq. 7), CR the row softmax of W W^T for a classifier's weight W
(C, d) (section III-B). Both come from the last checkpoint; clients' own heads come from the
versions that the checkpoint names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from scipy.special import softmax
from scipy.stats import spearmanr

from fedhet.common.checksums import read_label
from fedhet.common.errors import DamagedFileError
from fedhet.report.run_data import Run

LEAST_CLASSES, MOST_CLASSES = 3, 100  # two classes have a single number per row
MOST_NORMS = 20_000  # of a run in the data file: the first clients, if there are more
MILLION = 1_000_000
SOFT_LABELS = "state/soft_labels/soft_labels/means"
HEAD = "params/head.weight"
OWN_HEAD = "personal/head.weight"

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Relations:
    """How the classes of a run relate after its last round; matrices are in millionths."""

    soft_labels: Sequence[Sequence[int]]  # SL (C, C)
    head: Sequence[Sequence[int]]  # CR (C, C)
    distance: float  # the mean of (SL - CR)^2 over the C^2 entries, eq. 11 without mu
    rank_correlation: float | None  # Spearman's, of the entries off the diagonal


@dataclass(frozen=True)
class HeadNorms:
    """The norms of the rows of clients' own heads."""

    clients: Sequence[int]  # ids
    norms: Sequence[Sequence[float]]  # (clients, C), ||w_c||, to four digits


def relations_of(run: Run) -> Relations | None:
    """Return the class relations that were collected of a run."""
    found = run.figures.get("feddw", {}).get("relations")
    return Relations(**found) if found else None


def head_norms_of(run: Run) -> HeadNorms | None:
    """Return the norms of heads that were collected of a run."""
    found = run.figures.get("feddw", {}).get("head_norms")
    return HeadNorms(**found) if found else None


def read_relations(folder: Path) -> Relations | None:
    """Return a run's class relations; None without soft labels, or with too few or many classes."""
    found = _tensors(_last_checkpoint(folder), SOFT_LABELS, HEAD)
    if found is None or not LEAST_CLASSES <= len(found[0]) <= MOST_CLASSES:
        return None
    labels, weight = found
    head: Array = softmax(weight @ weight.T, axis=1)
    off = ~np.eye(len(labels), dtype=bool)
    correlation = rank_correlation(labels[off], head[off])
    return Relations(
        np.rint(MILLION * labels).astype(int).tolist(),
        np.rint(MILLION * head).astype(int).tolist(),
        _rounded(float(np.mean((labels - head) ** 2)), digits=6),
        None if correlation is None else _rounded(correlation, digits=6),
    )


def read_head_norms(folder: Path) -> HeadNorms | None:
    """Return the norms of the clients' own heads; None if the clients have none."""
    about = _metadata(_last_checkpoint(folder))
    # client_app/state.py writes these files; only the versions that the server has taken count
    states = folder / "client_state" / str(about.get("experiment"))
    if not states.is_dir():
        return None
    committed = {int(client): version for client, version in about["committed"].items()}
    norms: dict[int, list[float]] = {}
    for client, version in sorted(committed.items()):
        path = states / f"client-{client:05d}" / f"round-{version:06d}.safetensors"
        found = _tensors(path, OWN_HEAD)
        if found is None:
            continue
        rows = np.linalg.norm(found[0], axis=1)
        if len(rows) > MOST_CLASSES or (len(norms) + 1) * len(rows) > MOST_NORMS:
            break
        norms[client] = [_rounded(float(norm), digits=4) for norm in rows]
    return HeadNorms(list(norms), list(norms.values())) if norms else None


def rank_correlation(one: Array, other: Array) -> float | None:
    """Return Spearman's rank correlation; None if all values of a side are equal."""
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(spearmanr(one, other).statistic)


def _last_checkpoint(folder: Path) -> Path:
    found = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    return found[-1] if found else folder / "checkpoints" / "none"


def _tensors(path: Path, *names: str) -> list[Array] | None:
    """Return tensors of a file; None if one is missing or not finite, or the file is damaged."""
    try:
        read_label(path)  # refuses a damaged file
        with safe_open(path, framework="np") as file:
            found = [file.get_tensor(name).astype(np.float64) for name in names]
    except (OSError, SafetensorError, DamagedFileError):
        return None
    return found if all(np.isfinite(values).all() for values in found) else None


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint; empty without one."""
    try:
        return read_label(path)
    except DamagedFileError:
        return {}


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
