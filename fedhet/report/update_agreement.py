"""Plots how far the clients' updates agree (strategies/round/update_diagnostics.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

import pandas as pd

from fedhet.report.blocks import Block, Heading, Key, Table
from fedhet.report.charts import Panel, gallery
from fedhet.report.data_file import AGREEMENT
from fedhet.report.figures import line_panels, lines_are, over_rounds
from fedhet.report.layout import Cell, Layout, only_runs
from fedhet.report.names import column_title, listed
from fedhet.report.run_data import LATE_ROUNDS, Run
from fedhet.report.statistics import mean_text
from fedhet.report.tables import cell_table

LOGARITHMIC = ("drift_diversity",)  # it has no upper bound: updates may cancel


def agreement(layout: Layout, keys: Mapping[str, Key], every: int, stem: Path) -> list[Block]:
    """Return the three figures over rounds, one in ``every``, and their means over the last."""
    measured = only_runs(layout, _has_figures)
    runs = measured.completed
    if not runs:
        return []
    blocks: list[Block] = [Heading(3, "How far updates agree")]
    several_rounds = any(len(run.points(name)) > 1 for run in runs for name in AGREEMENT)
    if several_rounds and (panels := _panels(measured, keys)):
        blocks.append(gallery(panels, _caption(panels, runs, every), stem, {"round": "agreement"}))
    return [*blocks, _table(measured)]


def _has_figures(run: Run) -> bool:
    """Return whether a run has the figures, of several clients."""
    several = any(size > 1 for size in _cohorts(run))
    return several and any(run.points(name) for name in AGREEMENT)


def _panels(layout: Layout, keys: Mapping[str, Key]) -> list[Panel]:
    """Return a panel per column and figure; those of a figure have the same range of y."""
    sizes = [_sizes(layout.column(column)) for column in layout.columns]
    found: list[list[Panel]] = []
    for name in AGREEMENT:
        dotted = [_orthogonal(name, some) for some in sizes]
        text = listed(
            dict.fromkeys(words for some, (_, words) in zip(sizes, dotted, strict=True) if some)
        )
        labels = ("round", f"{column_title(name)} (dotted: {text})")
        marks, log = [marks for marks, _ in dotted], name in LOGARITHMIC
        points = partial(over_rounds, column=name)
        found.append(line_panels(layout, keys, points, labels, marks=marks, log=log))
    return sorted(
        (panel for panels in found for panel in panels),
        key=lambda panel: [*layout.columns, ""].index(panel.title),
    )


def _sizes(cells: Sequence[Cell]) -> list[float]:
    """Return |S| in a column: the median over the rounds of each row, without duplicates."""
    found = [[size for run in cell.runs for size in _cohorts(run)] for cell in cells]
    return sorted({median(some) for some in found if some})


def _cohorts(run: Run) -> list[float]:
    """Return |S| of each round that had a valid reply."""
    return [size for _, size in run.points("clients") if size > 0]


def _orthogonal(name: str, sizes: Sequence[float]) -> tuple[list[float], str]:
    """Return the figure for orthogonal updates of equal length, of |S| clients, and its text."""
    if name == "norm_ratio":
        text = f"1/√{sizes[0]:g}" if len(sizes) == 1 else "1/√|S|"
        return [1 / math.sqrt(size) for size in sizes], text
    return ([0.0], "0") if name == "update_cosine" else ([1.0], "1")


def _caption(panels: Sequence[Panel], runs: Sequence[Run], every: int) -> str:
    sizes = sorted({size for run in runs for size in _cohorts(run)})
    words = [
        "Norm ratio: the norm of the updates' mean over the mean of their norms, FedMRUR's 1/d_t "
        "(Theorem 1). Pairwise cosine: the mean over all pairs of updates. Drift diversity: the "
        "sum of the squared norms over the squared norm of the sum (FedPVR, Definition 1), on a "
        "logarithmic scale. Each is of one round's updates, over all trainable parameters that "
        "are shared. Dotted: orthogonal updates of equal length, 1/√|S|, 0 and 1; equal updates "
        "have 1, 1 and 1/|S|. S is the set of aggregated clients:",
        f"|S| = {sizes[0]:g}."
        if len(sizes) == 1
        else f"|S| is {sizes[0]:g} to {sizes[-1]:g}; dotted is a row's median over its rounds.",
        f"{lines_are(panels)} Nothing is smoothed.",
    ]
    if every > 1:
        words.append(f"One round in {every} is drawn, and all of the last {LATE_ROUNDS}.")
    return " ".join(words)


def _table(layout: Layout) -> Table:
    frame = pd.DataFrame(
        {column_title(name): _late_text(cell.runs, name) for name in AGREEMENT}
        for cell in layout.measured
    )
    caption = (
        f"Means over the last {LATE_ROUNDS} rounds of a run; mean ± sample standard deviation over "
        "the seeds. Runs without updates, or with one client per round, have no values."
    )
    return cell_table(layout, frame, caption)


def _late_text(runs: Sequence[Run], name: str) -> str:
    """Return the means over the last rounds of the runs that have values there, over the seeds."""
    means = []
    for run in runs:
        last = max(round for round, _ in run.points("round"))
        values = [value for round, value in run.points(name) if round > last - LATE_ROUNDS]
        means += [fmean(values)] if values else []
    return mean_text(means, 3)
