"""Decoded examples as arrays, and seeded splits of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Record:
    """One decoded example.

    Attributes:
        values: as the encoding has them: pixels (C, H, W) or tokens (T,).
        label: from 0.
        group: the natural id (such as a writer), where there is one.
    """

    values: NDArray[Any]
    label: int
    group: str | None = None


class Encoding(Protocol):
    """How an example, as its source has it, becomes an array."""

    @property
    def kind(self) -> str:
        """What the arrays hold: the cache's folder and file are called so."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example's array."""

    @property
    def dtype(self) -> type[np.integer]:
        """Of the arrays."""

    @property
    def identity(self) -> dict[str, object]:
        """What the arrays depend on beside the source, as plain values."""

    def encode(self, value: Any) -> NDArray[Any]:
        """Return the array of a table's value."""


class Decoder(Protocol):
    """One split of a data set, not yet decoded."""

    @property
    def identity(self) -> dict[str, object]:
        """What the decoded examples depend on, as plain values."""

    @property
    def encoding(self) -> Encoding:
        """How they are decoded."""

    def count(self) -> int:
        """Return the number of examples."""

    def records(self) -> Iterator[Record]:
        """Yield the examples in order."""


@dataclass(frozen=True)
class Split:
    """Some examples of decoded arrays, which may be memory-mapped.

    Attributes:
        values: of all examples, (n, C, H, W) pixels or (n, T) tokens.
        labels: of this split's examples, (m,).
        groups: the natural ids of this split's examples as numbers, (m,).
        rows: where this split's examples are in ``values``, (m,); None: all, in order.
    """

    values: NDArray[Any]
    labels: Indices
    groups: Indices | None = None
    rows: Indices | None = None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    def select(self, chosen: Indices) -> Split:
        """Return the chosen examples without reading their values."""
        return Split(
            self.values,
            self.labels[chosen],
            None if self.groups is None else self.groups[chosen],
            chosen if self.rows is None else self.rows[chosen],
        )

    def read(self) -> NDArray[Any]:
        """Read this split's values: (m, C, H, W) or (m, T)."""
        return np.asarray(self.values if self.rows is None else self.values[self.rows])


def stratified_split(strata: NDArray[Any], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split rows so that each stratum gives the same fraction, up to rounding.

    Args:
        strata: of each row, (n,).
        fraction: of the rows that the second part gets, rounded up; a stratum keeps at least one.
        seed: of the choice.

    Returns:
        The rows of the first and of the second part, each ascending.
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
