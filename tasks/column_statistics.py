"""Statistics of a table's columns, fitted on the rows of several sites that nobody else sees.

A site sends n, mean and sum of squared deviations M of each numeric column, and the categories of
each categorical one. Two parts combine to (Chan, Golub, LeVeque 1983, Algorithms for Computing the
Sample Variance, eq. 2.1)

    n = n_a + n_b,  d = mean_b - mean_a
    mean = mean_a + d n_b / n,  M = M_a + M_b + d^2 n_a n_b / n

so all sites together have the statistics of the pooled rows, to which scikit-learn would fit its
SimpleImputer, StandardScaler and OneHotEncoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_CATEGORIES = 1000  # of a column, at all sites: each is an input of the model
LONGEST_CATEGORY = 200  # characters

Array = NDArray[np.float64]
Categories = tuple[str | None, ...]  # ascending; None, a missing value, last


@dataclass(frozen=True)
class ColumnStatistics:
    """The statistics that a table's transformers are fitted to; k numeric, m categorical columns.

    Attributes:
        rows: the number of rows.
        counts: (k,), the number of rows that have a number.
        means: (k,), the means of these numbers; 0 if there are none.
        squares: (k,), their summed squared deviations from the mean.
        categories: the categories of each categorical column.
    """

    rows: int
    counts: Array
    means: Array
    squares: Array
    categories: tuple[Categories, ...]

    @classmethod
    def of(cls, prepared: DataFrame, numeric: Sequence[str]) -> ColumnStatistics:
        """Return the statistics of a table with the numeric columns as float64, others as text."""
        numbers = prepared[list(numeric)].to_numpy(dtype=np.float64)
        counts = np.isfinite(numbers).sum(axis=0).astype(np.float64)
        means = np.nansum(numbers, axis=0) / np.maximum(counts, 1)
        squares = np.nansum((numbers - means) ** 2, axis=0)
        others = [name for name in prepared.columns if name not in numeric]
        found = tuple(_ascending(set(prepared[name])) for name in others)
        for name, categories in zip(others, found, strict=True):
            _check_size(name, categories)
        return cls(len(prepared), counts, means, squares, found)

    def variances(self) -> Array:
        """Return the columns' variances (k,), with the mean in place of each missing number."""
        return np.asarray(self.squares / max(self.rows, 1), dtype=np.float64)

    def to_json(self) -> str:
        """Return the statistics as text that :meth:`from_json` reads back to the bit."""
        return json.dumps(
            {
                "rows": self.rows,
                "counts": self.counts.tolist(),
                "means": self.means.tolist(),
                "squares": self.squares.tolist(),
                "categories": self.categories,
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> ColumnStatistics:
        """Read what :meth:`to_json` has written; raise a ConfigError for other text."""
        try:
            plain = json.loads(text)
            arrays = [np.array(plain[n], dtype=np.float64) for n in ("counts", "means", "squares")]
            categories = tuple(_ascending(set(column)) for column in plain["categories"])
            rows = int(plain["rows"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"statistics of a table's columns cannot be read: {error}") from None
        counts, means, squares = arrays
        return cls(rows, counts, means, squares, categories)

    def is_close(self, other: ColumnStatistics) -> bool:
        """Return whether both are of the same rows, but for how a machine rounds its sums."""
        pairs = ((self.means, other.means), (self.squares, other.squares))
        return (
            (self.rows, self.categories) == (other.rows, other.categories)
            and np.array_equal(self.counts, other.counts)
            and all(np.allclose(*pair, rtol=1e-9, atol=0.0) for pair in pairs)
        )

    def require(self, numeric: int, categorical: int) -> None:
        """Reject statistics of another number of columns."""
        shapes = {array.shape for array in (self.counts, self.means, self.squares)}
        if shapes != {(numeric,)} or len(self.categories) != categorical:
            raise ConfigError(
                f"statistics of {self.counts.shape[0]} numeric and {len(self.categories)} "
                f"categorical columns do not fit a table of {numeric} and {categorical} "
                "(task.data_options.numeric, .categorical)"
            )


def merged(parts: Sequence[ColumnStatistics], categorical: Sequence[str]) -> ColumnStatistics:
    """Return the statistics of all parts' rows together.

    Args:
        parts: at least one, with the same columns; their order decides the last bits.
        categorical: the names of the categorical columns.

    Raises:
        ConfigError: if a column has more than MOST_CATEGORIES.
    """
    whole = reduce(_pair, parts)
    for name, categories in zip(categorical, whole.categories, strict=True):
        _check_size(name, categories)
    return whole


def _pair(a: ColumnStatistics, b: ColumnStatistics) -> ColumnStatistics:
    counts, between = a.counts + b.counts, b.means - a.means
    share = b.counts / np.maximum(counts, 1)
    return ColumnStatistics(
        a.rows + b.rows,
        counts,
        np.where(a.counts > 0, a.means + between * share, b.means),
        a.squares + b.squares + between**2 * a.counts * share,
        tuple(_ascending({*x, *y}) for x, y in zip(a.categories, b.categories, strict=True)),
    )


def _ascending(found: set[str | None]) -> Categories:
    """Return categories as scikit-learn orders them."""
    missing: Categories = (None,) if None in found else ()
    return (*sorted(one for one in found if one is not None), *missing)


def _check_size(name: str, categories: Categories) -> None:
    if len(categories) > MOST_CATEGORIES:
        raise ConfigError(
            f"task.data_options.categorical: {name} has {len(categories)} categories, but a column "
            f"may have at most {MOST_CATEGORIES} at all sites together: leave the column out, or "
            "put it into task.data_options.numeric"
        )
    longest = max((len(one) for one in categories if one is not None), default=0)
    if longest > LONGEST_CATEGORY:
        raise ConfigError(
            f"task.data_options.categorical: {name} has a category of {longest} characters, but "
            f"the sites send at most {LONGEST_CATEGORY}: leave the column out"
        )
