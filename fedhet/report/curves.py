"""Draws panels of curves: a mean over seeds and the band from the lowest to the highest."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedhet.report.blocks import Key, Picture
from fedhet.report.colors import PALETTE, THEME
from fedhet.report.run_data import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COUNTED = ("round", "tensor", "layer")  # labels of x whose ticks are whole numbers
INK, AXIS, GRID = (THEME[name].light for name in ("ink", "axis", "grid"))
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",  # text stays text: a tenth of the size
    "axes.linewidth": 0.8,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Curve:
    """A line over x with its band; a single run has no band.

    A run that is not completed has a line of its own, which ends with a cross.
    """

    key: Key
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    runs: int
    completed: bool = True


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


def over_runs(key: Key, by_run: Sequence[Mapping[float, float]]) -> Curve | None:
    """Return the curve of several runs' values by x, where all runs have x; None without any."""
    shared = sorted(set(by_run[0]).intersection(*by_run[1:])) if by_run else []
    if not shared:
        return None
    values = [[points[x] for points in by_run] for x in shared]
    low, high = [min(at_x) for at_x in values], [max(at_x) for at_x in values]
    return Curve(key, shared, [statistics.fmean(at_x) for at_x in values], low, high, len(by_run))


def over_bytes(line: Curve, runs: Sequence[Run], unit: float) -> Curve:
    """Return the curve over the bytes up and down, divided by ``unit``: the runs' mean."""
    sent = [[run.bytes_until(int(round)) / unit for run in runs] for round in line.x]
    return replace(line, x=[statistics.fmean(at_round) for at_round in sent])


def common_range(
    curves: Sequence[Curve], marks: Sequence[float] = (), *, log: bool = False
) -> tuple[float, float] | None:
    """Return a range of y that holds all curves and marks; ``log``: on a logarithmic scale."""
    if not curves:
        return None
    low = min([*marks, *(value for line in curves for value in line.low)])
    high = max([*marks, *(value for line in curves for value in line.high)])
    if log:
        factor = (high / low) ** 0.04 if high > low else 2.0
        return low / factor, high * factor
    margin = 0.04 * (high - low) or abs(high) or 1.0
    return low - margin, high + margin


def draw_panel(axes: Axes, panel: Panel, font: float) -> None:
    """Draw one panel."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    for mark in panel.marks:
        axes.axhline(mark, color=AXIS, lw=1.2, ls=(0, (1, 2)), zorder=0.9)  # above the grid
    for number, line in enumerate(panel.curves):
        color = PALETTE[line.key.color].light
        style = (0, (4, 2)) if line.key.dashed else "-"
        if line.runs > 1:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, lw=0)
        if not line.completed:
            axes.plot(line.x, line.mean, color=color, lw=1.0, ls=style)
            axes.plot(line.x[-1:], line.mean[-1:], color=color, marker="x", ms=6)
            continue
        marker = "o" if len(line.x) == 1 else ""
        width = 2.4 - 1.0 * number / max(1, len(panel.curves) - 1)  # equal lines stay visible
        axes.plot(line.x, line.mean, color=color, lw=width, ls=style, marker=marker, ms=4)
    axes.set_title(panel.title, loc="left", fontsize=font + 1, color=INK, pad=5)
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
    axes.set_xlabel(x_label, fontsize=font, color=INK, labelpad=2)
    axes.set_ylabel(y_label, fontsize=font, color=INK, labelpad=3)
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


def svg_text(figure: Figure, name: str, *, transparent: bool = False) -> str:
    """Return a figure as SVG, reproducible byte for byte; its ids depend on ``name``."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None})
    return buffer.getvalue()


def inline_svg(text: str, *, themed: bool) -> str:
    """Return an SVG for HTML: without prolog and fixed size, its colours as CSS variables."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    text = re.sub(r"<svg[^>]*>", f"<svg {view[0]}>", text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # axes_1 is in every picture
    text = re.sub(r">\s+<", "><", text)
    if themed:
        for name, pair in THEME.items():
            text = text.replace(pair.light, f"var(--{name})")
        for number, pair in enumerate(PALETTE):
            text = text.replace(pair.light, f"var(--line-{number})")
    return text.strip()


def gallery(panels: Sequence[Panel], caption: str, stem: Path, kind: str, abreast: int) -> Picture:
    """Save panels as one picture with a legend, named ``<stem>_<kind>``; ``abreast`` in a row."""
    import matplotlib

    legend = list({line.key.label: line.key for p in panels for line in p.curves}.values())
    abreast = min(abreast, len(panels))
    rows = -(-len(panels) // abreast)
    legend_height = 0.26 * -(-len(legend) // (2 * abreast)) + 0.1
    width, height = 4.0 * abreast, 2.8 * rows + legend_height
    with matplotlib.rc_context(_STYLE):
        figure = new_figure(width, height)
        for number, panel in enumerate(panels):
            left, top = 4.0 * (number % abreast), height - legend_height
            bottom = top - 2.8 * (number // abreast + 1)
            place = ((left + 0.6) / width, (bottom + 0.5) / height, 3.3 / width, 1.95 / height)
            draw_panel(figure.add_axes(place), panel, 9.0)
        add_legend(figure, legend, columns=2 * abreast)
        return save(figure, stem.with_name(f"{stem.name}_{kind}"), caption)


def add_legend(figure: Figure, legend: Sequence[Key], columns: int) -> None:
    """Draw a legend above everything, with at most ``columns`` entries in a row."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=PALETTE[key.color].light, lw=2.2, ls="--" if key.dashed else "-")
        for key in legend
    ]
    style: Any = {"frameon": False, "fontsize": 9.5, "labelcolor": INK, "borderaxespad": 0.2}
    labels, ncols = [key.label for key in legend], min(len(legend), columns)
    figure.legend(handles, labels, loc="upper left", ncols=ncols, **style)


def save(figure: Figure, path: Path, caption: str, *, themed: bool = True) -> Picture:
    """Save a figure as PNG and SVG, and return it for the page; ``path`` has no ending."""
    figure.savefig(path.with_name(f"{path.name}.png"), dpi=120, metadata={"Software": None})
    text = svg_text(figure, path.name)
    path.with_name(f"{path.name}.svg").write_text(text, encoding="utf-8")
    if themed:
        text = svg_text(figure, path.name, transparent=True)
    return Picture(inline_svg(text, themed=themed), caption, path.name, themed)
