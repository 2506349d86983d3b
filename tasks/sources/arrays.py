"""Decoded examples as arrays, and seeded splits of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
SPLIT_SEED = 0  # the same test examples whatever the run's seed


@dataclass(frozen=True)
class Record:
    """One example.

    Attributes:
        value: the value in its table; decoded: pixels (C, H, W) or tokens (T,).
        label: the label, from 0.
        client: whose it is (such as a writer's), if that is known.
    """

    value: Any
    label: int
    client: str | None = None


@dataclass(frozen=True)
class Split:
    """Some examples of decoded arrays, which may be memory-mapped.

    Attributes:
        values: all examples, (n, C, H, W) pixels or (n, T) tokens.
        labels: the labels of this split's examples, (m,).
        clients: whose each of this split's examples is, (m,), as text.
        rows: rows of this split's examples in ``values``, (m,); None: all, in order.
    """

    values: NDArray[Any]
    labels: Indices
    clients: NDArray[np.str_] | None = None
    rows: Indices | None = None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    def select(self, chosen: Indices) -> Split:
        """Return the chosen examples without reading their values."""
        return Split(
            self.values,
            self.labels[chosen],
            None if self.clients is None else self.clients[chosen],
            chosen if self.rows is None else self.rows[chosen],
        )

    def read(self) -> NDArray[Any]:
        """Read this split's values: (m, C, H, W) or (m, T)."""
        return np.asarray(self.values if self.rows is None else self.values[self.rows])


def numbered(clients: NDArray[np.str_]) -> tuple[tuple[str, ...], Indices]:
    """Return the different clients by their sorted value, and whose each example is, (n,).

    Whole numbers are sorted as such, and other values as text.
    """
    names, numbers = np.unique(clients.astype(str), return_inverse=True)
    order = np.arange(len(names))
    if all(name.isdecimal() for name in names.tolist()):
        order = np.argsort(np.array([int(name) for name in names]), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return tuple(names[order].tolist()), place[numbers].astype(np.int64)


def random_split(size: int, fraction: float) -> tuple[Indices, Indices]:
    """Split rows at random, always in the same way; the second part has the rounded fraction."""
    order = np.random.default_rng(SPLIT_SEED).permutation(size)
    count = round(fraction * size)
    return np.sort(order[count:]), np.sort(order[:count])


def stratified_split(strata: NDArray[Any], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split rows so that each stratum gives the same fraction, up to rounding.

    Args:
        strata: the stratum of each row, (n,).
        fraction: share of the rows in the second part, rounded up; each stratum keeps at least one.
        seed: seed of the choice.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(strata))
    shuffled = shuffled[np.argsort(strata[shuffled], kind="stable")]
    _, starts, sizes = np.unique(strata[shuffled], return_index=True, return_counts=True)
    shares = sizes * fraction
    taken = np.floor(shares).astype(np.int64)
    missing = int(np.ceil(len(strata) * fraction - 1e-9)) - int(taken.sum())
    taken[np.argsort(taken - shares, kind="stable")[:missing]] += 1
    taken = np.minimum(taken, sizes - 1)
    chosen = np.zeros(len(strata), dtype=bool)
    for start, count in zip(starts, taken, strict=True):
        chosen[shuffled[start : start + count]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
