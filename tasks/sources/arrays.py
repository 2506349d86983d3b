"""Decoded images as arrays, and seeded splits of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Record:
    """One decoded example.

    Attributes:
        pixels: (C, H, W), uint8.
        label: from 0.
        group: the natural id (such as a writer), where there is one.
    """

    pixels: NDArray[np.uint8]
    label: int
    group: str | None = None


class Decoder(Protocol):
    """One split of a data set, not yet decoded."""

    @property
    def identity(self) -> dict[str, object]:
        """What the decoded images depend on, as plain values."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""

    def count(self) -> int:
        """Return the number of examples."""

    def records(self) -> Iterator[Record]:
        """Yield the examples in order."""


@dataclass(frozen=True)
class Split:
    """Some examples of decoded arrays, which may be memory-mapped.

    Attributes:
        images: of all examples, (n, C, H, W), uint8.
        labels: of this split's examples, (m,).
        groups: the natural ids of this split's examples as numbers, (m,).
        rows: where this split's examples are in ``images``, (m,); None: all, in order.
    """

    images: NDArray[np.uint8]
    labels: Indices
    groups: Indices | None = None
    rows: Indices | None = None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    def select(self, chosen: Indices) -> Split:
        """Return the chosen examples without reading their images."""
        return Split(
            self.images,
            self.labels[chosen],
            None if self.groups is None else self.groups[chosen],
            chosen if self.rows is None else self.rows[chosen],
        )

    def pixels(self) -> NDArray[np.uint8]:
        """Read this split's images: (m, C, H, W)."""
        return np.asarray(self.images if self.rows is None else self.images[self.rows])


def stratified_split(strata: Indices, fraction: float, seed: int) -> tuple[Indices, Indices]:
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
