"""Draws the table of runs of a single round, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading, Key
from fedhet.report.colors import GRID, PALETTE
from fedhet.report.curves import new_figure, save, style_axes
from fedhet.report.layout import NO_COLUMN, Layout, Line
from fedhet.report.legend import legend_of
from fedhet.report.names import plain
from fedhet.report.run_data import score_of
from fedhet.report.statistics import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

WIDTH, HEIGHT, FONT = 4.4, 3.6, 9.0  # inches, points
MARKERS = ("o", "s", "D", "^")  # by style
_FILL = 0.8  # share of a column's width that its dots take


def single_round(layout: Layout) -> bool:
    """Return whether no run has more than one round: there is no curve to draw."""
    cells = [cell for line in layout.lines for cell in line.cells]
    runs = [run for cell in cells for run in (*cell.runs, *cell.others)]
    score = score_of(runs)
    return score is None or all(round <= 1 for run in runs for round, _ in run.points(score))


def scores(layout: Layout, keys: Mapping[str, Key], figure: Figure, stem: Path) -> list[Block]:
    """Return the columns and rows that have runs as a picture."""
    kept = [any(line.cells[n].runs for line in layout.lines) for n in range(len(layout.columns))]
    columns = list(compress(layout.columns, kept))
    rows = [line for line in layout.lines if any(cell.runs for cell in line.cells)]
    lines = [replace(line, cells=tuple(compress(line.cells, kept))) for line in rows]
    if not can_plot() or not lines:
        return []
    path = stem.with_name(f"{stem.name}_scores")
    legend = [keys[line.label] for line in lines]
    words = ["Dot: mean over the seeds. Bar: from the lowest to the highest seed."]
    if any(cell.published for line in lines for cell in line.cells):
        words.append("Ring beside it: the paper's number.")
    picture = save(_draw(columns, lines, legend, figure), path, " ".join(words))
    return [Heading(3, f"{figure.title[0].upper()}{figure.title[1:]}"), picture]


def _draw(
    columns: Sequence[str], lines: Sequence[Line], legend: Sequence[Key], figure: Figure
) -> MatplotlibFigure:
    width = max(WIDTH, 1.0 + 0.13 * len(columns) * (len(lines) + 2))
    above = legend_of(legend, width)
    height = HEIGHT + above.height + 0.15
    drawn = new_figure(width, height)
    axes = drawn.add_axes((0.62 / width, 0.5 / height, 1 - 0.72 / width, (HEIGHT - 0.5) / height))
    for number, (line, key) in enumerate(zip(lines, legend, strict=True)):
        _draw_line(axes, line, key, figure, _FILL * ((number + 0.5) / len(lines) - 0.5))
    style_axes(axes, "", figure.title, FONT)
    titles = ["" if column == NO_COLUMN else column.replace(", ", "\n") for column in columns]
    axes.set_xticks(range(len(columns)), list(map(plain, titles)))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    for between in range(1, len(columns)):
        axes.axvline(between - 0.5, color=GRID, lw=0.8, zorder=0.9)
    above.draw(drawn)
    return drawn


def _draw_line(axes: Axes, line: Line, key: Key, figure: Figure, aside: float) -> None:
    """Draw a row's dots; each style has its marker."""
    color, marker = PALETTE[key.color].light, MARKERS[key.style]
    for number, cell in enumerate(line.cells):
        measured = [found.number for run in cell.runs if (found := figure.of(run)) is not None]
        x = number + aside
        if not measured:
            continue
        axes.vlines(x, min(measured), max(measured), color=color, lw=1.6, alpha=0.45)
        axes.plot([x], [fmean(measured)], marker, color=color, ms=5)
        if cell.published and cell.published.mean is not None:
            axes.plot([x], [cell.published.mean], marker, mfc="none", mec=color, ms=7, mew=1.1)
