"""What a run has left of its classifiers: how its classes relate, and the norms of clients' heads.

Liu et al., FedDW, https://arxiv.org/abs/2412.04521. SL is the global soft-label matrix (eq. 7), CR
the row softmax of W W^T for a classifier's weight W (C, d) (section III-B). Both are read from the
last checkpoint, clients' own heads from the versions that it names. No torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

LEAST_CLASSES, MOST_CLASSES = 3, 100  # with two there is one number a row: nothing to see
MOST_NORMS = 20_000  # of a run in the data file: the first clients, where there are more
MILLION = 1_000_000
SOFT_LABELS = "state/soft_labels/soft_labels/means"
HEAD = "params/head.weight"
OWN_HEAD = "personal/head.weight"

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Relations:
    """How the classes of a run relate, after its last round.

    Args:
        soft_labels: SL (C, C), in millionths: whole numbers are half as long in the data file.
        head: CR (C, C), in millionths.
        distance: the mean of (SL - CR)^2 over the C^2 entries, eq. 11 without mu.
        rank_correlation: of the entries off the diagonal; None where it is not defined.
    """

    soft_labels: Sequence[Sequence[int]]
    head: Sequence[Sequence[int]]
    distance: float
    rank_correlation: float | None


@dataclass(frozen=True)
class HeadNorms:
    """The norms of the rows of clients' own heads.

    Args:
        clients: by number.
        norms: (clients, C), ||w_c||, to four digits.
    """

    clients: Sequence[int]
    norms: Sequence[Sequence[float]]


def read_relations(folder: Path) -> Relations | None:
    """Return a run's class relations; None without soft labels, or with too few or many classes."""
    found = _tensors(_last_checkpoint(folder), SOFT_LABELS, HEAD)
    if found is None or not LEAST_CLASSES <= len(found[0]) <= MOST_CLASSES:
        return None
    labels, weight = found
    head = class_relations(weight)
    off = ~np.eye(len(labels), dtype=bool)
    correlation = rank_correlation(labels[off], head[off])
    return Relations(
        _millionths(labels),
        _millionths(head),
        _rounded(float(np.mean((labels - head) ** 2)), digits=6),
        None if correlation is None else _rounded(correlation, digits=6),
    )


def read_head_norms(folder: Path) -> HeadNorms | None:
    """Return the norms of the clients' own heads; None where clients have none."""
    about = _metadata(_last_checkpoint(folder))
    # What client_app/state.py writes; only the versions that the server has taken count.
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


def class_relations(weight: Array) -> Array:
    """Return CR (C, C), the row softmax of W W^T, of a classifier's weight W (C, d)."""
    products = weight @ weight.T
    powers = np.exp(products - products.max(axis=1, keepdims=True))
    relations: Array = powers / powers.sum(axis=1, keepdims=True)
    return relations


def rank_correlation(one: Array, other: Array) -> float | None:
    """Return Spearman's rank correlation; None where all values of a side are equal, or one."""
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Array) -> Array:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = np.cumsum(counts) - (counts - 1) / 2
    return ranks[place]


# ---- files ---------------------------------------------------------------------------------------


def _last_checkpoint(folder: Path) -> Path:
    found = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    return found[-1] if found else folder / "checkpoints" / "none"


def _tensors(path: Path, *names: str) -> list[Array] | None:
    """Return tensors of a file; None where one is missing or not finite, or the file damaged."""
    try:
        with safe_open(path, framework="np") as file:
            if not set(names) <= set(file.keys()):
                return None
            found = [file.get_tensor(name).astype(np.float64) for name in names]
    except (OSError, SafetensorError):
        return None
    return found if all(np.isfinite(values).all() for values in found) else None


def _metadata(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; empty where there is none."""
    try:
        with safe_open(path, framework="np") as file:
            about = json.loads((file.metadata() or {}).get("fedhet", "{}"))
    except (OSError, SafetensorError):
        return {}
    return dict(about)


def _millionths(matrix: Array) -> list[list[int]]:
    return [[round(MILLION * entry) for entry in row] for row in matrix.tolist()]


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
