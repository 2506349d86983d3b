"""The way of a fusion over the loss surface, and its accuracy by iteration (MA-Echo, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Entry, Heading, Listing, Paragraph, Table
from fedhet.report.colors import PALETTE
from fedhet.report.curves import AXIS, INK, style_axes
from fedhet.report.layout import Layout, first_runs
from fedhet.report.side_by_side import FONT, WIDTH, Picture, Spot, pair_gallery, set_title
from reproductions.maecho.fusion_path import FusionPath

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SHOWN = 12  # runs
COLORS = "YlGnBu"
HEIGHT, SIDE, LEFT, BOTTOM = 4.0, 3.1, 0.62, 0.5  # inches
# On the picture, whose colours are the same on a dark page: not those of the theme.
LIGHT, WAY = "#ffffff", "#d1495b"

Shown = Sequence[tuple[str, FusionPath]]


def fusion(layout: Layout, stem: Path) -> list[Block]:
    """Return how the fusion of each cell's first run went on, where it was fused again.

    Args:
        layout: rows and columns.
        stem: how the picture's name begins.
    """
    runs = first_runs(layout, lambda run: run.fusion is not None)
    named = [(label, run.fusion) for label, run in runs if run.fusion is not None]
    found = [(label, way) for label, way in named if not way.error]
    missing = [f"{label}: {way.error}" for label, way in named if way.error]
    if not named:
        return []
    blocks: list[Block] = [Heading(3, "The way of the fusion")]
    if found and can_plot():
        shown = found[:MOST_SHOWN]
        pairs = [
            (_surface(label, way), _course(number, shown))
            for number, (label, way) in enumerate(shown)
        ]
        path = stem.with_name(f"{stem.name}_fusion")
        blocks.append(pair_gallery(pairs, _caption(shown, len(found) - len(shown)), path, HEIGHT))
    blocks += [_table(found)] if found else []
    if missing:
        blocks += [Paragraph("Not to be had here:"), Listing(missing)]
    return blocks


def _caption(shown: Shown, left_out: int) -> str:
    words = [
        "Left: the loss on the plane of the fusion's first two steps, as in the paper, on "
        f"{shown[0][1].examples} examples of the test set; the scale of colours is logarithmic and "
        "each picture's own. The line: the iterates, from the circle to the star. From the fourth "
        "on they need not lie in the plane, and are shown at the point nearest to them; the loss "
        "there is that of the plane, not their own. Right: "
        f"{'accuracy' if shown[0][1].accuracy else 'loss'} on the whole test set after so many "
        "iterations, the scale of which is logarithmic from 1 on; grey: the other runs.",
    ]
    if left_out:
        words.append(f"{left_out} further runs are only in the table.")
    return " ".join(words)


def _table(found: Shown) -> Table:
    rows = []
    for label, way in found:
        first, last = (_scored(way, place) for place in (0, -1))
        half = _halfway(way)
        rows.append([Entry(label), *map(Entry, (first, last, half, f"{100 * way.in_plane:.0f}"))])
    return Table(
        ["", "at first", "at the end", "halfway after", "of the way in the plane (%)"],
        rows,
        "Accuracy on the test set (%), or the loss where there is none; after how many iterations "
        "half of the gain is reached; and the share of the squared lengths of the ways from the "
        "first iterate to each that lies in the plane.",
    )


def _values(way: FusionPath) -> Sequence[float]:
    return [100 * value for value in way.accuracy] or way.loss


def _scored(way: FusionPath, place: int) -> str:
    return f"{_values(way)[place]:.2f}"


def _halfway(way: FusionPath) -> str:
    values = np.asarray(_values(way))
    gain = values[-1] - values[0]
    if gain == 0:
        return "-"
    reached = (values - values[0]) / gain >= 0.5
    return str(way.iterations[int(np.argmax(reached))])


# ---- drawing -------------------------------------------------------------------------------------


def _surface(label: str, way: FusionPath) -> Picture:
    return Picture(f"loss · {label}", lambda spot: _draw_surface(spot, label, way))


def _draw_surface(spot: Spot, label: str, way: FusionPath) -> None:
    from matplotlib.colors import LogNorm

    x, y = np.asarray(way.x), np.asarray(way.y)
    side = min(SIDE, HEIGHT - BOTTOM - 0.4)
    axes = spot.axes(LEFT, BOTTOM, side, side)
    surface = np.asarray(way.surface)
    low = max(1e-6, float(surface.min()))
    high = max(2 * low, float(surface.max()))
    step = float(x[1] - x[0]) / 2
    image = axes.imshow(
        surface,
        cmap=COLORS,
        norm=LogNorm(low, high),
        origin="lower",
        extent=(x[0] - step, x[-1] + step, y[0] - step, y[-1] + step),
        interpolation="bilinear",
    )
    levels = np.geomspace(low, high, 12)
    axes.contour(x, y, surface, levels=levels, colors=LIGHT, linewidths=0.6, alpha=0.7)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(y[0], y[-1])
    _draw_path(axes, way)
    set_title(axes, f"loss · {label}", WIDTH - LEFT - 0.2)
    style_axes(axes, "along the first step", "across it", FONT)
    axes.grid(visible=False)
    bar = spot.figure.colorbar(image, cax=spot.axes(LEFT + side + 0.12, BOTTOM, 0.1, side))
    ticks = np.geomspace(low, high, 4)
    bar.set_ticks(ticks.tolist(), labels=[f"{tick:.2g}" for tick in ticks], minor=False)
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=FONT - 1, labelcolor=INK, color=AXIS, length=2, pad=2)
    bar.outline.set_edgecolor(AXIS)


def _draw_path(axes: Axes, way: FusionPath) -> None:
    path = np.asarray(way.path)
    axes.plot(path[:, 0], path[:, 1], color=LIGHT, lw=3.2, solid_capstyle="round")
    axes.plot(path[:, 0], path[:, 1], color=WAY, lw=1.6, marker=".", ms=3.5)
    for place, marker, size in ((0, "o", 6), (-1, "*", 11)):
        axes.plot(*path[place], marker=marker, ms=size, mfc=WAY, mec=LIGHT, mew=0.8, ls="")


def _course(number: int, shown: Shown) -> Picture:
    label = shown[number][0]
    return Picture(f"by iteration · {label}", lambda spot: _draw_course(spot, number, shown))


def _draw_course(spot: Spot, number: int, shown: Shown) -> None:
    axes = spot.axes(LEFT, BOTTOM, WIDTH - LEFT - 0.2, HEIGHT - BOTTOM - 0.4)
    ways = [way for _, way in shown]
    for way in (*ways[:number], *ways[number + 1 :]):
        axes.plot(way.iterations, _values(way), color=AXIS, lw=1.0, alpha=0.6)
    own = ways[number]
    color = PALETTE[0].light
    axes.plot(own.iterations, _values(own), color=color, lw=2.0, marker="o", ms=3)
    name = "test accuracy (%)" if own.accuracy else "test loss"
    set_title(axes, shown[number][0], WIDTH - LEFT - 0.2)
    style_axes(axes, "iteration", name, FONT)
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)
    ticks = [t for t in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if t <= own.iterations[-1]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.03)
