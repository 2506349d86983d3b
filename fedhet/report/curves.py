"""Draws panels of curves: a mean over seeds and the band from the lowest to the highest."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedhet.plot import can_plot
from fedhet.report.blocks import Chart, Key, Picture
from fedhet.report.colors import AXIS, GRID, INK, PALETTE, style_of
from fedhet.report.legend import in_lines, legend_of
from fedhet.report.names import plain
from fedhet.report.run_data import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COUNTED = ("round", "tensor", "layer")  # labels of x whose ticks are whole numbers
EARLY = 0.1  # of a curve's range of x: the steep start does not decide the range of y
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",  # text stays text: a tenth of the size
    "axes.linewidth": 0.8,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Curve:
    """A line over x with its band; a single run has no band.

    A run that is not completed has a line of its own, which ends with a cross. ``axes`` holds other
    x of the same points, by the axis's label.
    """

    key: Key
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    runs: int
    completed: bool = True
    axes: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[float] = ()  # dotted horizontal lines, such as targets
    y_range: tuple[float, float] | None = None  # None: as the curves need
    log: bool = False  # the scale of y

    def over(self, axis: str) -> Panel:
        """Return the panel over another axis, of the curves that have it."""
        curves = [replace(line, x=line.axes[axis]) for line in self.curves if axis in line.axes]
        return replace(self, x_label=axis, curves=curves)


def over_runs(key: Key, by_run: Sequence[Mapping[float, float]]) -> Curve | None:
    """Return the curve of several runs' values by x, where all runs have x; None without any."""
    shared = sorted(set(by_run[0]).intersection(*by_run[1:])) if by_run else []
    if not shared:
        return None
    values = [[points[x] for points in by_run] for x in shared]
    low, high = [min(at_x) for at_x in values], [max(at_x) for at_x in values]
    return Curve(key, shared, [statistics.fmean(at_x) for at_x in values], low, high, len(by_run))


def with_axes(line: Curve, runs: Sequence[Run], units: Mapping[str, tuple[str, float]]) -> Curve:
    """Return a curve over rounds with the runs' means of other x.

    ``units`` has for each axis's label the column, or ``bytes``, and its unit.
    """
    found = {}
    for label, (column, unit) in units.items():
        by_run = [
            run.bytes_by_round() if column == "bytes" else dict(run.points(column)) for run in runs
        ]
        if all(int(x) in points or x == 0 for points in by_run for x in line.x):
            found[label] = [
                statistics.fmean(p.get(int(x), 0.0) / unit for p in by_run) for x in line.x
            ]
    return replace(line, axes=found)


def common_range(
    curves: Sequence[Curve], marks: Sequence[float] = (), *, log: bool = False
) -> tuple[float, float] | None:
    """Return a range of y for all curves and marks; ``log``: on a logarithmic scale.

    The first tenth of a curve does not widen it, so that late differences can be seen; of two
    points both do.
    """
    if not curves:
        return None
    low = min([*marks, *(value for line in curves for value in _late(line.x, line.low))])
    high = max([*marks, *(value for line in curves for value in _late(line.x, line.high))])
    if log:
        factor = (high / low) ** 0.04 if high > low else 2.0
        return low / factor, high * factor
    margin = 0.04 * (high - low) or abs(high) or 1.0
    return low - margin, high + margin


def _late(x: Sequence[float], values: Sequence[float]) -> list[float]:
    start = x[0] + EARLY * (x[-1] - x[0])
    late = [value for at, value in zip(x, values, strict=True) if at >= start]
    return late if len(late) > 1 else list(values)


def draw_panel(axes: Axes, panel: Panel, font: float) -> None:
    """Draw one panel."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    for mark in panel.marks:
        axes.axhline(mark, color=AXIS, lw=1.2, ls=(0, (1, 2)), zorder=0.9)  # above the grid
    for number, line in enumerate(panel.curves):
        color = PALETTE[line.key.color].light
        style = style_of(line.key)
        if line.runs > 1:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, lw=0)
        if not line.completed:
            axes.plot(line.x, line.mean, color=color, lw=1.0, ls=style)
            axes.plot(line.x[-1:], line.mean[-1:], color=color, marker="x", ms=6)
            continue
        marker = "o" if len(line.x) == 1 else ""
        width = 2.4 - 1.0 * number / max(1, len(panel.curves) - 1)  # equal lines stay visible
        axes.plot(line.x, line.mean, color=color, lw=width, ls=style, marker=marker, ms=4)
    axes.set_title(plain(panel.title), loc="left", fontsize=font + 1, color=INK, pad=5)
    style_axes(axes, panel.x_label, panel.y_label, font)
    steps = [1, 2, 2.5, 5, 10]
    whole = panel.x_label in COUNTED
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps, integer=whole))
    axes.margins(x=0.02)
    if panel.log:
        axes.set_yscale("log")
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    if panel.log:
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=steps))
        axes.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
        axes.yaxis.get_offset_text().set(size=font - 1, color=INK)


def style_axes(axes: Axes, x_label: str, y_label: str, font: float) -> None:
    """Set the labels of axes, and the style of all pictures."""
    axes.set_xlabel(plain(x_label), fontsize=font, color=INK, labelpad=2)
    axes.set_ylabel(plain(y_label), fontsize=font, color=INK, labelpad=3)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=INK, labelsize=font, color=AXIS, length=3, pad=2)


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Return a figure without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def gallery(
    panels: Sequence[Panel], caption: str, stem: Path, kinds: Mapping[str, str], abreast: int = 3
) -> Chart:
    """Return panels as a chart, which has a picture of them over each axis.

    ``kinds`` has the endings of the pictures' names by the axis's label, the first that of x.
    ``abreast`` panels are in a row. More lines than colours make several pictures: ``_rounds``,
    ``_rounds_2``. An axis that no line has gets none.
    """
    first = panels[0].x_label
    over = {label: [one for p in panels if (one := p.over(label)).curves] for label in kinds}
    labels = [first, *(label for label in kinds if label != first and over[label])]
    legend = list({line.key.label: line.key for p in panels for line in p.curves}.values())
    pictures = {
        f"{stem.name}_{kinds[label]}{part}": partial(_save_panels, shown, group, abreast)
        for label, drawn in {**over, first: panels}.items()
        for part, group in _groups(legend).items()
        if can_plot() and (shown := _with_lines(drawn, group))
    }
    return Chart(caption, chart_data(panels, labels, abreast), legend, pictures)


def _groups(legend: Sequence[Key]) -> dict[str, list[Key]]:
    """Return the lines of each picture by its name's ending: none has a colour twice."""
    groups: list[list[Key]] = []
    for key in legend:
        free = [group for group in groups if key.color not in [other.color for other in group]]
        groups += [] if free else [[]]
        (free or groups[-1:])[0].append(key)
    return {f"_{number}" if number > 1 else "": group for number, group in enumerate(groups, 1)}


def _with_lines(panels: Sequence[Panel], keys: Sequence[Key]) -> list[Panel]:
    """Return the panels with the lines of these keys alone; none without a line."""
    kept = [replace(p, curves=[line for line in p.curves if line.key in keys]) for p in panels]
    return [panel for panel in kept if panel.curves]


def chart_data(panels: Sequence[Panel], axes: Sequence[str], abreast: int) -> dict[str, Any]:
    """Return what templates/page.js draws; lines refer to their x by index, since many share it."""
    places: dict[tuple[float, ...], int] = {}

    def place(x: Sequence[float]) -> int:
        return places.setdefault(tuple(_short(x)), len(places))

    def line_data(line: Curve) -> dict[str, Any]:
        over = [place(line.x), *(place(line.axes.get(axis, ())) for axis in axes[1:])]
        data = {"label": line.key.label, "x": over, "y": _short(line.mean), "runs": line.runs}
        data |= {"color": line.key.color, "style": line.key.style, "completed": line.completed}
        return data | (
            {"low": _short(line.low), "high": _short(line.high)} if line.runs > 1 else {}
        )

    drawn = [
        {
            **{"title": panel.title, "y": panel.y_label, "log": panel.log},
            **{"range": panel.y_range, "marks": list(panel.marks)},
            "lines": [line_data(line) for line in panel.curves],
        }
        for panel in panels
    ]
    return {"axes": list(axes), "abreast": abreast, "panels": drawn, "x": list(map(list, places))}


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _save_panels(panels: Sequence[Panel], legend: Sequence[Key], abreast: int, path: Path) -> None:
    import matplotlib

    abreast, font = min(abreast, len(panels)), 9.0
    panels = [replace(one, title=in_lines(one.title, 72 * 3.3, font + 1)) for one in panels]
    one_row = 2.8 + 0.17 * max(panel.title.count("\n") for panel in panels)
    rows = -(-len(panels) // abreast)
    width = 4.0 * abreast
    with matplotlib.rc_context(_STYLE):
        shown = legend_of(legend, width)
        above = shown.height + 0.1
        height = one_row * rows + above
        figure = new_figure(width, height)
        for number, panel in enumerate(panels):
            left, top = 4.0 * (number % abreast), height - above
            bottom = top - one_row * (number // abreast + 1)
            place = ((left + 0.6) / width, (bottom + 0.5) / height, 3.3 / width, 1.95 / height)
            draw_panel(figure.add_axes(place), panel, font)
        shown.draw(figure)
        save(figure, path, "")


def save(figure: Figure, path: Path, caption: str) -> Picture:
    """Save a figure as PNG and SVG, the same byte for byte each time; ``path`` has no ending."""
    import matplotlib

    figure.savefig(path.with_name(f"{path.name}.png"), dpi=120, metadata={"Software": None})
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": path.name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    path.with_name(f"{path.name}.svg").write_text(buffer.getvalue(), encoding="utf-8")
    return Picture(buffer.getvalue(), caption, path.name)
