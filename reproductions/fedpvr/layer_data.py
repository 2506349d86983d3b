"""What a run has written of its layers (server_app/layer_diagnostics.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common.results import Row, read_rows

LAYERS, SIMILARITY = "layers.jsonl", "similarity.jsonl"  # of layer_diagnostics
MOST_ROUNDS = 40  # that are kept: a picture has no room for more
DIGITS = 4

Values = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class LayerFigures:
    """A run's figures by layer; None where one is not defined.

    Args:
        tensors: their names, in the model's order.
        matrices: the places among them of those with two dimensions or more: no biases, no norms.
        rounds: that are kept.
        diversity: drift diversity, (rounds, tensors).
        late: drift diversity, the mean over the run's last ten rounds, of each tensor.
        norms: the mean norm of the updates, the same.
        layers: at whose outputs clients' models were compared.
        compared: the rounds in which they were.
        similarity: linear CKA, the mean over all pairs of clients, (compared, layers).
    """

    tensors: Sequence[str] = ()
    matrices: Sequence[int] = ()
    rounds: Sequence[int] = ()
    diversity: Values = ()
    late: Sequence[float | None] = ()
    norms: Sequence[float | None] = ()
    layers: Sequence[str] = ()
    compared: Sequence[int] = ()
    similarity: Values = ()


def read_layers(folder: Path, late_rounds: int) -> LayerFigures | None:
    """Return what a run has written; None if it has written neither file, or they are unreadable.

    Args:
        folder: of the run.
        late_rounds: how many are the last ones.
    """
    try:
        rows, alike = _rows(folder / LAYERS), _rows(folder / SIMILARITY)
        if not rows and not alike:
            return None
        return LayerFigures(**_of_tensors(rows, late_rounds), **_of_layers(alike))
    except (ValueError, KeyError, TypeError):  # cut short, or written by hand
        return None


def _rows(path: Path) -> list[Row]:
    return read_rows(path) if path.is_file() else []


def _of_tensors(rows: Sequence[Row], late_rounds: int) -> dict[str, Any]:
    measured = [row for row in rows if row["round"] > 0]
    if not measured:
        return {}
    shapes: Mapping[str, Sequence[int]] = rows[0]["shapes"]
    step = math.ceil(len(measured) / MOST_ROUNDS)
    last = measured[-1]["round"]
    kept = [row for row in measured if row["round"] % step == 0 or row["round"] in (1, last)]
    late = [row for row in measured if row["round"] > last - late_rounds]
    return {
        "tensors": list(shapes),
        "matrices": [place for place, shape in enumerate(shapes.values()) if len(shape) > 1],
        "rounds": [row["round"] for row in kept],
        "diversity": [_short(row["drift_diversity"].get(n) for n in shapes) for row in kept],
        "late": _short(_mean(r["drift_diversity"].get(n) for r in late) for n in shapes),
        "norms": _short(_mean(r["update_norm"].get(n) for r in late) for n in shapes),
    }


def _of_layers(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    layers = list(rows[0]["cka"])
    return {
        "layers": layers,
        "compared": [row["round"] for row in rows],
        "similarity": [_short(_over_pairs(row["cka"][layer]) for layer in layers) for row in rows],
    }


def _over_pairs(matrix: Values) -> float | None:
    """Return the mean of a symmetric matrix's entries above the diagonal."""
    return _mean(value for row, values in enumerate(matrix) for value in values[row + 1 :])


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _short(values: Any) -> list[float | None]:
    return [None if value is None else float(f"{value:.{DIGITS}g}") for value in values]
