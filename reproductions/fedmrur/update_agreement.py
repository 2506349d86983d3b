"""How far the clients' updates agree, over rounds (update_diagnostics.py has the formulas)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Entry, Heading, Key, Table
from fedhet.report.curves import Curve, Panel, common_range
from fedhet.report.data_file import AGREEMENT, AGREEMENT_ROUNDS
from fedhet.report.figures import curves_of, gallery, lines_are
from fedhet.report.layout import NO_COLUMN, Cell, Layout
from fedhet.report.run_data import Run
from fedhet.report.statistics import over_seeds
from fedhet.report.tables import cell_table

NAMES = {
    "norm_ratio": "norm ratio",
    "update_cosine": "pairwise cosine",
    "drift_diversity": "drift diversity",
}
LOGARITHMIC = ("drift_diversity",)  # it has no upper bound: updates may cancel
MOST_DRAWN = 660  # points of a panel: 60 rounds of eleven lines

Curves = Mapping[str, Sequence[Sequence[Curve]]]  # of a figure, then of a column


def agreement(layout: Layout, keys: Mapping[str, Key], every: int, stem: Path) -> list[Block]:
    """Return the three figures over rounds, if there are several, and the last rounds' means.

    Args:
        layout: rows and columns.
        keys: the lines' colours.
        every: of how many rounds the data has one.
        stem: how the picture's name begins.
    """
    measured = _measured(layout)
    runs = [run for line in measured.lines for cell in line.cells for run in cell.runs]
    if not runs:
        return []
    blocks: list[Block] = [Heading(3, "How far updates agree")]
    over_rounds = any(len(run.points(name)) > 1 for run in runs for name in AGREEMENT)
    if over_rounds and can_plot():
        curves = {
            name: [[line for line, _ in lines] for lines in curves_of(measured, keys, name)]
            for name in AGREEMENT
        }
        step = _step(curves, every)
        if panels := _panels(measured, curves, step):
            blocks.append(gallery(panels, _caption(panels, runs, step), stem, "agreement", 3))
    return [*blocks, _table(measured)]


def _measured(layout: Layout) -> Layout:
    """Return the layout with those runs alone that have the figures, of several clients."""

    def measured(cell: Cell) -> Cell:
        return replace(cell, runs=tuple(run for run in cell.runs if _has_figures(run)))

    lines = [replace(line, cells=tuple(map(measured, line.cells))) for line in layout.lines]
    return replace(layout, lines=tuple(lines))


def _has_figures(run: Run) -> bool:
    several = any(size > 1 for _, size in run.points("clients"))
    return several and any(run.points(name) for name in AGREEMENT)


def _step(curves: Curves, every: int) -> int:
    """Return of how many rounds one is drawn: more than the data's for many lines."""
    panels = [lines for found in curves.values() for lines in found]
    most = max(sum(round % every == 0 for line in lines for round in line.x) for lines in panels)
    return every * max(1, -(-most // MOST_DRAWN))


def _panels(layout: Layout, curves: Curves, step: int) -> list[Panel]:
    """Return for each column a panel of each figure; those of one figure have one range of y."""
    sizes = [_sizes(layout, number) for number in range(len(layout.columns))]
    by_column: list[list[Panel]] = [[] for _ in layout.columns]
    for name, found in curves.items():
        drawn = [[_drawn(line, step) for line in lines] for lines in found]
        marks = [_orthogonal(name, some) for some in sizes]
        log = name in LOGARITHMIC
        y_range = common_range(
            [line for lines in drawn for line in lines],
            [mark for some in marks for mark in some],
            log=log,
        )
        for number, column in enumerate(layout.columns):
            if lines := drawn[number]:
                title = "" if column == NO_COLUMN else column
                label = f"{NAMES[name]} (dotted: {_orthogonal_text(name, sizes[number])})"
                panel = Panel(title, "round", label, lines, marks[number], y_range, log)
                by_column[number].append(panel)
    return [panel for panels in by_column for panel in panels]


def _sizes(layout: Layout, number: int) -> list[float]:
    """Return |S| in a column: the median over the rounds of each row, each once."""
    cells = [line.cells[number].runs for line in layout.lines]
    found = [[size for run in runs for _, size in run.points("clients")] for runs in cells]
    return sorted({median(some) for some in found if some})


def _orthogonal(name: str, sizes: Sequence[float]) -> list[float]:
    """Return the figure for orthogonal, equally long updates of so many clients."""
    if name == "norm_ratio":
        return [1 / math.sqrt(size) for size in sizes]
    return [0.0] if name == "update_cosine" else [1.0]


def _orthogonal_text(name: str, sizes: Sequence[float]) -> str:
    if name == "norm_ratio":
        return f"1/√{sizes[0]:g}" if len(sizes) == 1 else "1/√|S|"
    return "0" if name == "update_cosine" else "1"


def _drawn(line: Curve, step: int) -> Curve:
    """Keep every step-th round and the last; the data may have more of the late ones."""
    last = len(line.x) - 1
    kept = [n for n, round in enumerate(line.x) if round % step == 0 or n == last]
    x, mean, low, high = (
        [values[n] for n in kept] for values in (line.x, line.mean, line.low, line.high)
    )
    return replace(line, x=x, mean=mean, low=low, high=high)


def _caption(panels: Sequence[Panel], runs: Sequence[Run], step: int) -> str:
    sizes = sorted({size for run in runs for _, size in run.points("clients")})
    words = [
        "Norm ratio: the norm of the updates' mean over the mean of their norms, FedMRUR's 1/d_t "
        "(Theorem 1). Pairwise cosine: the mean over all pairs of updates. Drift diversity: the "
        "sum of the squared norms over the squared norm of the sum (FedPVR, Definition 1), on a "
        "logarithmic scale. Each is of one round's updates, over all trainable parameters that "
        "are shared. Dotted: orthogonal updates of equal length, 1/√|S|, 0 and 1; equal updates "
        "have 1, 1 and 1/|S|. S is the clients that were aggregated:",
        f"|S| = {sizes[0]:g}."
        if len(sizes) == 1
        else f"{sizes[0]:g} to {sizes[-1]:g} of them; dotted is a row's median over its rounds.",
        f"{lines_are(panels)} Nothing is smoothed.",
    ]
    if step > 1:
        words.append(f"Of every {step} rounds one is drawn.")
    return " ".join(words)


def _table(layout: Layout) -> Table:
    """Return the means over the last rounds of each cell that has runs."""
    rows = [
        [Entry(_late_text(cell.runs, name)) for name in AGREEMENT]
        for number in range(len(layout.columns))
        for line in layout.lines
        if (cell := line.cells[number]).runs
    ]
    caption = (
        f"Means over the last {AGREEMENT_ROUNDS} rounds of a run; mean ± sample standard "
        "deviation over the seeds. Runs that send no updates, or of one client a round, have none."
    )
    return cell_table(layout, list(NAMES.values()), rows, caption)


def _late_text(runs: Sequence[Run], name: str) -> str:
    means = [mean for run in runs if (mean := _late_mean(run, name)) is not None]
    return over_seeds(means).text(3) if means else "-"


def _late_mean(run: Run, name: str) -> float | None:
    """Return the mean over the run's last rounds; None if it has no value there."""
    last = max(round for round, _ in run.points("round"))
    values = [value for round, value in run.points(name) if round > last - AGREEMENT_ROUNDS]
    return fmean(values) if values else None
