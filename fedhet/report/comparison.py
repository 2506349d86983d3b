"""Ranks the rows of a column, and compares them with a baseline in pairs of equal seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from fedhet.common.errors import ConfigError
from fedhet.report.blocks import Entry, Table
from fedhet.report.layout import NO_COLUMN, Cell, Layout
from fedhet.report.names import listed
from fedhet.report.statistics import ACCURACIES, Estimate, Figure, decimals, estimate

DEFAULT_BASELINES = ("fedavg", "average")  # the first that is there
_MOST_DECIMALS = 4  # of a difference
_UNITS = {
    **dict.fromkeys(ACCURACIES, " points"),
    **{"rounds_to": " rounds", "bytes_to": " MB", "seconds_to": " simulated seconds"},
}


@dataclass(frozen=True)
class Ranked:
    """A row of a column."""

    label: str
    score: Estimate
    difference: Estimate | None  # to the baseline over common seeds; None without any, or for it


@dataclass(frozen=True)
class Comparison:
    """The rows of a column from the best to the worst."""

    column: str
    figure: Figure
    baseline: str
    rows: Sequence[Ranked]

    @property
    def digits(self) -> int:
        """Decimals of its numbers."""
        return decimals(self.figure, [row.score.mean for row in self.rows], of_percent=1)

    @property
    def gap_digits(self) -> int:
        """Decimals of its differences: enough for the end next to 0 of an interval without it."""
        gaps = [row.difference for row in self.rows if row.difference and row.difference.sign]
        ends = [min(map(abs, gap.interval)) for gap in gaps if gap.interval]
        needed = [math.ceil(-math.log10(end)) for end in ends]
        return max(self.digits, min(_MOST_DECIMALS, max(needed, default=0)))


def comparisons(layout: Layout, figure: Figure, baseline: str = "") -> list[Comparison]:
    """Return the comparison of each column that has runs.

    ``baseline`` is a row's label or method; by default it is the plain mean of models, or else
    the first row.
    """
    found = []
    for column in layout.columns:
        pairs = [(cell, estimate(figure, cell.runs)) for cell in layout.column(column)]
        if scores := [(cell, score) for cell, score in pairs if score]:
            found.append(_comparison(column, scores, figure, baseline))
    return found


def check_baseline(layouts: Sequence[Layout], baseline: str) -> None:
    """Raise a ConfigError if no row is the baseline."""
    names = [word for layout in layouts for row, m in layout.methods.items() for word in (m, row)]
    if baseline and not names:
        raise ConfigError(f"--baseline {baseline}: no run is completed, so there is none")
    if baseline and baseline.casefold() not in map(str.casefold, names):
        allowed = ", ".join(dict.fromkeys(names))
        raise ConfigError(f"--baseline {baseline} is unknown; allowed: {allowed}")


def _comparison(
    column: str, scores: Sequence[tuple[Cell, Estimate]], figure: Figure, baseline: str
) -> Comparison:
    called = {  # the first of a name comes last, and stays
        name.casefold(): pair for pair in scores[::-1] for name in (pair[0].method, pair[0].row)
    }
    wanted = [baseline.casefold()] if baseline else DEFAULT_BASELINES
    chosen, base = next((called[name] for name in wanted if name in called), scores[0])
    rows = [
        Ranked(cell.row, score, None if cell is chosen else score.minus(base))
        for cell, score in scores
    ]
    better = -1 if figure.larger_is_better else 1
    rows.sort(key=lambda row: (bool(row.score.bounds), better * row.score.mean))
    return Comparison(column, figure, chosen.row, rows)


def ranked_table(found: Sequence[Comparison]) -> Table:
    """Return the rows of all columns from the best to the worst, with intervals."""
    records = []
    for one in found:
        means = [None if row.score.bounds else row.score.mean for row in one.rows]
        for row in one.rows:
            place = None if row.score.bounds else means.index(row.score.mean) + 1
            digits, gap_digits, gap = one.digits, one.gap_digits, row.difference
            minus = f"{gap.mean:+.{gap_digits}f}" if gap else "-"
            best = place == 1 and len(one.rows) > 1
            records.append(
                {
                    "method": Entry(row.label, best=best),
                    "setting": one.column,
                    "rank": str(place or "-"),
                    "mean": Entry(row.score.text(digits), best=best),
                    "95 % interval": row.score.interval_text(digits),
                    "seeds": str(row.score.count),
                    "minus the baseline": "the baseline" if row.label == one.baseline else minus,
                    "its 95 % interval": gap.interval_text(gap_digits, "+") if gap else "-",
                    "common seeds": str(gap.count) if gap else "-",
                }
            )
    frame = pd.DataFrame(records)
    if [one.column for one in found] == [NO_COLUMN]:
        frame = frame.drop(columns="setting")
    if all(len(one.rows) == 1 for one in found):
        alone = ["method", "setting", "mean", "95 % interval", "seeds"]
        frame = frame[[name for name in alone if name in frame]]
        return Table(frame, _caption(found), words=frame.columns.get_loc("mean"))
    return Table(frame, _caption(found), words=frame.columns.get_loc("rank"))


def _caption(found: Sequence[Comparison]) -> str:
    title, compared = found[0].figure.title, max(len(one.rows) for one in found) - 1
    order = "in each setting the best first" if len(found) > 1 else "the best first"
    baselines = listed(one.baseline for one in found)
    words = [
        f"{title[0].upper()}{title[1:]}, {order}; mean ± sample standard deviation over "
        "the seeds. Intervals: Student's t over the seeds."
    ]
    if compared:
        words.append(f"Baseline: {baselines}; differences are over the seeds that both rows have.")
    if compared > 1:
        words.append(f"Each interval is on its own, not corrected for {compared} comparisons.")
    return " ".join(words)


def verdict(found: Sequence[Comparison]) -> list[str]:
    """Return in words which rows are above or below the baseline; of many columns, the best row."""
    most = None if len(found) == 1 else 1
    return [sentence for one in found for sentence in _column_verdict(one)[:most]]


def _column_verdict(one: Comparison) -> list[str]:
    best, others = one.rows[0], [row for row in one.rows if row.label != one.baseline]
    if not others:
        sentences = [f"{best.label}: {_score_text(one, best)}. {_seeds_text(one, best)}"]
    elif best.score.bounds:
        sentences = ["No row has reached the target in all of its seeds."]
    elif best.label == one.baseline:
        sentences = [f"The best mean is that of {best.label}: {_score_text(one, best)}."]
    else:
        sentences = [_pair_text(one, best)]
        others.remove(best)
    gaps = [(row, row.difference) for row in others]
    seen = [row for row, gap in gaps if gap and gap.is_seen]
    sentences += [_pair_text(one, row) for row in seen[:3]]
    unseen = [(row, gap) for row, gap in gaps if gap and not gap.is_seen]
    reached = " that reached the target" if one.figure.target is not None else ""
    groups = {
        "A difference to {0} can also be seen for {1}.": seen[3:],
        "No difference to {0} can be seen for {1}.": [r for r, gap in unseen if gap.count > 1],
        "With a single common seed, no interval can be said of {0} and {1}.": [
            row for row, gap in unseen if gap.count == 1
        ],
        f"{{1}} cannot be compared with {{0}}: they have no seed in common{reached}.": [
            row for row, gap in gaps if gap is None
        ],
    }
    for text, rows in groups.items():
        if rows:
            named = text.format(one.baseline, listed(row.label for row in rows))
            sentences.append(named + "".join(_missed_text(one, row) for row in rows))
    where = "" if one.column == NO_COLUMN else f"{one.column}: "
    return [f"{where}{sentence}" for sentence in sentences]


def _pair_text(one: Comparison, row: Ranked) -> str:
    """Return the sentence about a row and the baseline."""
    gap, digits = row.difference, one.gap_digits
    if gap is None:
        alone = f"it has no seed in common with {one.baseline}"
        return f"{row.label} has the best mean, {_score_text(one, row)}; {alone}."
    unit = _UNITS.get(one.figure.name, "") if one.figure.percent or one.digits == 1 else ""
    side, seeds = "above" if gap.mean > 0 else "below", f"{gap.count} common seeds"
    pair = f"{row.label} is {abs(gap.mean):.{digits}f}{unit} {side} {one.baseline}"
    low, high = sorted(map(abs, gap.interval or (0.0, 0.0)))
    if gap.sign:
        said = f"{pair} [{low:.{digits}f}, {high:.{digits}f}] over {seeds}."
    elif gap.interval:
        said = (
            f"No difference can be seen between {row.label} and {one.baseline}: "
            f"{gap.mean:+.{digits}f}{unit} {gap.interval_text(digits, '+')} over {seeds}."
        )
    elif gap.count == 1:
        said = f"{pair} with one common seed: no interval can be said of one seed."
    else:
        equal = f"{row.label} and {one.baseline} are equal"
        said = f"{pair if abs(gap.mean) > gap.rounding else equal} with each of {seeds}."
    return said + _missed_text(one, row)


def _missed_text(one: Comparison, row: Ranked) -> str:
    """Return in how many seeds the two have reached the target, if not in all."""
    pair = [other for other in one.rows if other.label in (row.label, one.baseline)]
    counts = [
        f"{other.label} in {len(other.score.numbers)} of {other.score.count} seeds"
        for other in pair
        if other.score.bounds
    ]
    return f" The target was reached by {listed(counts)}." if counts else ""


def _score_text(one: Comparison, row: Ranked) -> str:
    text = f"{one.figure.title.removesuffix(' (%)')} {row.score.text(one.digits)}"
    return f"{text} %" if one.figure.percent and one.figure.name in ACCURACIES else text


def _seeds_text(one: Comparison, row: Ranked) -> str:
    score, seeds = row.score, f"{row.score.count} seeds."
    if score.count == 1:
        return "One seed: no interval can be said."
    if score.interval:
        return f"95 % interval {score.interval_text(one.digits)} over {seeds}"
    return seeds if score.bounds else f"Equal in all of {seeds}"
