"""Ranks of methods over several settings: Friedman's test and Nemenyi's critical difference.

J. Demsar. Statistical comparisons of classifiers over multiple data sets. JMLR 7, 2006. With R_j
the mean of a method's ranks on N data sets, over which k methods are compared (1 is the best; equal
ones share the mean of their ranks):

    chi2_F = 12 N / (k (k + 1)) (sum_j R_j^2 - k (k + 1)^2 / 4)
    F_F = (N - 1) chi2_F / (N (k - 1) - chi2_F)           F with k - 1 and (k - 1)(N - 1) degrees
    CD = q sqrt(k (k + 1) / (6 N))                        q: of the studentized range, over sqrt 2

Two methods differ if their mean ranks differ by CD or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedhet.report.blocks import Block, Chart, Heading, Table
from fedhet.report.charts import CONFIG, number, rows_of
from fedhet.report.colors import INK
from fedhet.report.comparison import Comparison
from fedhet.report.statistics import Figure, decimals

LEVEL = 0.05
LEAST = 3  # settings, and methods, of which ranks are shown


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of k methods on N settings."""

    mean: pd.Series  # by method, the best first
    settings: int  # N

    @classmethod
    def of(cls, scores: pd.DataFrame, *, larger_is_better: bool = True) -> Ranks:
        """Rank scores with a row for each setting and a column for each method."""
        ranks = scores.rank(axis="columns", ascending=not larger_is_better)
        return cls(ranks.mean().sort_values(kind="stable"), len(scores))

    @property
    def friedman(self) -> float:
        """chi2_F."""
        k, squares = len(self.mean), float((self.mean**2).sum())
        return 12 * self.settings / (k * (k + 1)) * (squares - k * (k + 1) ** 2 / 4)

    @property
    def f_statistic(self) -> float:
        """F_F; infinite if the ranks are the same in all settings."""
        rest = self.settings * (len(self.mean) - 1) - self.friedman
        return (self.settings - 1) * self.friedman / rest if rest > 0 else math.inf

    @property
    def p_value(self) -> float:
        """The probability of an F_F that large if all methods are equal."""
        from scipy.stats import f  # half a second, which --help does without

        degrees = len(self.mean) - 1
        return float(f.sf(self.f_statistic, degrees, degrees * (self.settings - 1)))

    @cached_property
    def critical_difference(self) -> float:
        """CD at LEVEL."""
        from scipy.stats import studentized_range

        k = len(self.mean)
        q = float(studentized_range.ppf(1 - LEVEL, k, math.inf)) / math.sqrt(2)
        return q * math.sqrt(k * (k + 1) / (6 * self.settings))

    def below(self, method: str) -> list[str]:
        """Return the methods whose mean rank is worse by CD or more."""
        return list(self.mean.index[self.mean >= self.mean[method] + self.critical_difference])


def ranks_section(compared: Sequence[Comparison], stem: Path) -> list[Block]:
    """Return the ranks of the rows that every column has; nothing of few columns or rows."""
    means = {
        one.column: {row.label: row.score.mean for row in one.rows if not row.score.bounds}
        for one in compared
    }
    scores = pd.DataFrame(means).dropna()
    if scores.shape[0] < LEAST or scores.shape[1] < LEAST:
        return []
    rounded = scores.map(lambda score: float(f"{score:.5g}"))  # an older data file has six digits
    found = Ranks.of(rounded.T, larger_is_better=compared[0].figure.larger_is_better)
    return [
        Heading(3, "Ranks"),
        _table(found, compared[0].figure, scores),
        ranks_chart(found, stem),
    ]


def _table(found: Ranks, figure: Figure, scores: pd.DataFrame) -> Table:
    digits = decimals(figure, scores.to_numpy().ravel(), of_percent=1)
    records = [
        {
            "method": method,
            "mean rank": f"{rank:.2f}",
            "significantly worse": str(len(found.below(str(method)))),
            "mean over the settings": f"{scores.loc[method].mean():.{digits}f}",
        }
        for method, rank in found.mean.items()
    ]
    caption = (
        f"Ranks by the {figure.title}: their mean over {found.settings} settings, 1 is the best; "
        f"only rows with runs in all of them (Demsar 2006). Friedman's test: "
        f"chi2 = {found.friedman:.2f}, F = {found.f_statistic:.2f}, p = {found.p_value:.2g}. "
        f"Two rows differ significantly ({LEVEL:g}, Nemenyi) if their mean ranks differ by "
        f"{found.critical_difference:.2f} or more."
    )
    return Table(pd.DataFrame(records), caption)


def ranks_chart(found: Ranks, stem: Path) -> Chart:
    """Draw every mean rank with half a critical difference to both sides."""
    half = found.critical_difference / 2
    frame = pd.DataFrame({"method": found.mean.index, "rank": found.mean.to_numpy()})
    frame = frame.assign(low=frame["rank"] - half, high=frame["rank"] + half)
    rows: dict[str, Any] = {"field": "method", "type": "nominal", "title": None}
    rows |= {"sort": list(frame["method"]), "axis": {"labelLimit": 0, "grid": True}}
    mark = {"color": INK, "tooltip": True}
    rank = number("rank", "mean rank (1 is the best)") | {"scale": {"nice": False, "zero": False}}
    bars = {
        "mark": {**mark, "type": "rule", "size": 2, "opacity": 0.45},
        "encoding": {"y": rows, "x": {**rank, "field": "low"}, "x2": {"field": "high"}},
    }
    dots = {
        "mark": {**mark, "type": "point", "filled": True, "size": 60, "opacity": 1},
        "encoding": {"y": rows, "x": rank},
    }
    spec = {"width": 420, "height": {"step": 17}, "layer": [bars, dots], "config": CONFIG}
    caption = (
        f"Critical differences: bars are as long as CD = {found.critical_difference:.2f}. Two rows "
        "whose bars overlap cannot be told apart."
    )
    return Chart(caption, {"": spec}, {f"{stem.name}_ranks": spec}, rows_of(frame))
