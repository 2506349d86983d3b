"""Reads a run's figures by layer (server_app/listeners/diagnostics.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedhet.common.results import Row, read_rows

LAYERS, SIMILARITY = "layers.jsonl", "similarity.jsonl"
MOST_ROUNDS = 40  # that are kept: a picture has no room for more
DIGITS = 4

Values = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class LayerFigures:
    """A run's figures by layer; None where one is not defined."""

    tensors: Sequence[str] = ()  # names, in the model's order
    matrices: Sequence[int] = ()  # indices of tensors with two dimensions or more: no biases
    rounds: Sequence[int] = ()  # that are kept
    diversity: Values = ()  # drift diversity, (rounds, tensors)
    late: Sequence[float | None] = ()  # its mean over the run's last rounds, (tensors)
    norms: Sequence[float | None] = ()  # the same mean of the updates' norms
    layers: Sequence[str] = ()  # at whose outputs the clients' models were compared
    compared: Sequence[int] = ()  # the rounds of the comparisons
    similarity: Values = ()  # linear CKA, mean over all pairs of clients, (compared, layers)

    def by_tensor(self, values: Sequence[float | None]) -> dict[str, float]:
        """Return those values, one per tensor, that are defined."""
        pairs = zip(self.tensors, values, strict=False)
        return {name: value for name, value in pairs if value is not None}

    def last_similarity(self) -> dict[str, float]:
        """Return linear CKA by layer in the last comparison, where it is defined."""
        pairs = zip(self.layers, self.similarity[-1] if self.similarity else (), strict=False)
        return {name: value for name, value in pairs if value is not None}


def read_layers(folder: Path, late_rounds: int) -> LayerFigures:
    """Return a run's figures by layer; none if it has none, or its files cannot be read."""
    try:
        rows, similarity = _rows(folder / LAYERS), _rows(folder / SIMILARITY)
        return LayerFigures(**_of_tensors(rows, late_rounds), **_of_layers(similarity))
    except (ValueError, KeyError, TypeError):
        return LayerFigures()


def _rows(path: Path) -> list[Row]:
    return read_rows(path) if path.is_file() else []


def _of_tensors(rows: Sequence[Row], late_rounds: int) -> dict[str, Any]:
    measured = [row for row in rows if row["round"] > 0]
    if not measured:
        return {}
    shapes: Mapping[str, Sequence[int]] = rows[0]["shapes"]
    step = math.ceil(len(measured) / MOST_ROUNDS)
    last = measured[-1]["round"]
    diversity, norms = (
        pd.DataFrame([row[name] for row in measured], columns=list(shapes), dtype=float)
        for name in ("drift_diversity", "update_norm")
    )
    rounds = pd.Series([row["round"] for row in measured])
    kept = (rounds % step == 0) | rounds.isin((1, last))
    late = rounds > last - late_rounds
    return {
        "tensors": list(shapes),
        "matrices": [place for place, shape in enumerate(shapes.values()) if len(shape) > 1],
        "rounds": rounds[kept].tolist(),
        "diversity": [_rounded(row) for row in diversity[kept].to_numpy()],
        "late": _rounded(diversity[late].mean()),
        "norms": _rounded(norms[late].mean()),
    }


def _of_layers(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    layers = list(rows[0]["cka"])
    return {
        "layers": layers,
        "compared": [row["round"] for row in rows],
        "similarity": [_rounded(_pairs_mean(row["cka"][name]) for name in layers) for row in rows],
    }


def _pairs_mean(matrix: Values) -> float:
    """Return the mean of a symmetric matrix's entries above the diagonal; NaN without any."""
    values = np.asarray(matrix, dtype=float)
    return float(pd.Series(values[np.triu(np.ones_like(values, dtype=bool), 1)]).mean())


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for value in values]
