"""Plots a fusion's path over the loss surface, and accuracy by iteration (MA-Echo, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading, Table, not_available
from fedhet.report.colors import AXIS, PALETTE
from fedhet.report.layout import Layout, first_runs
from fedhet.reproductions.color_bar import add_color_bar
from fedhet.reproductions.maecho.fusion_path import FusionPath, fusion_path_of
from fedhet.reproductions.pictures import (
    FONT,
    WIDTH,
    Draw,
    Spot,
    picture_grid,
    set_title,
    style_axes,
)

MOST_SHOWN = 12  # runs
COLORS = "YlGnBu"
HEIGHT, SIDE, LEFT, BOTTOM = 4.0, 3.1, 0.62, 0.5  # inches
LIGHT, PATH = "#ffffff", "#d1495b"  # on the surface, which is the same on a dark page

Found = Sequence[tuple[str, FusionPath]]  # with labels


def fusion(layout: Layout, stem: Path) -> list[Block]:
    """Return the fusion's path of each cell's first run that has one."""
    named = [(label, path) for label, _, path in first_runs(layout, fusion_path_of)]
    found = [(label, path) for label, path in named if not path.error]
    missing = [f"{label}: {path.error}" for label, path in named if path.error]
    if not named:
        return []
    blocks: list[Block] = [Heading(3, "Path of the fusion")]
    if found and can_plot():
        shown = found[:MOST_SHOWN]
        pictures = [
            picture
            for number, (label, path) in enumerate(shown)
            for picture in (_surface(label, path), _by_iteration(number, shown))
        ]
        caption = _caption(shown, len(found) - len(shown))
        file = stem.with_name(f"{stem.name}_fusion")
        blocks.append(picture_grid(pictures, caption, file, HEIGHT))
    blocks += [_table(found)] if found else []
    return blocks + not_available(missing)


def _caption(shown: Found, left_out: int) -> str:
    words = (
        "Left: the loss on the plane of the fusion's first two steps, as in the paper, on "
        f"{shown[0][1].examples} examples of the test set; each picture has its own logarithmic "
        "scale of colours. The line: the iterates, from the circle to the star. From the fourth "
        "on they need not lie in the plane: the nearest point of the plane is shown, with the loss "
        "there, not their own. Right: "
        f"{'accuracy' if shown[0][1].accuracy else 'loss'} on the whole test set by iteration, on "
        "a scale that is logarithmic from 1 on; grey: the other runs."
    )
    return f"{words} {left_out} further runs are only in the table." if left_out else words


def _table(found: Found) -> Table:
    rows = []
    for label, path in found:
        values = np.asarray(_values(path))
        gain = values[-1] - values[0]
        half = "-"
        if gain != 0:
            half = str(path.iterations[int(np.argmax((values - values[0]) / gain >= 0.5))])
        in_plane = f"{100 * path.in_plane:.0f}"
        rows.append([label, f"{values[0]:.2f}", f"{values[-1]:.2f}", half, in_plane])
    columns = ["", "at first", "at the end", "halfway after", "of the path in the plane (%)"]
    return Table(
        pd.DataFrame(rows, columns=columns),
        "Accuracy on the test set (%), or the loss if there is none; the iterations until half of "
        "the gain is reached; and the share of the squared distances from the first iterate that "
        "lies in the plane.",
    )


def _values(path: FusionPath) -> Sequence[float]:
    return [100 * value for value in path.accuracy] or path.loss


def _surface(label: str, path: FusionPath) -> Draw:
    def draw(spot: Spot) -> None:
        from matplotlib.colors import LogNorm

        x, y, surface = np.asarray(path.x), np.asarray(path.y), np.asarray(path.surface)
        side = min(SIDE, HEIGHT - BOTTOM - 0.4)
        axes = spot.axes(LEFT, BOTTOM, side, side)
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
        points = np.asarray(path.path)
        axes.plot(*points.T, color=LIGHT, lw=3.2, solid_capstyle="round")
        axes.plot(*points.T, color=PATH, lw=1.6, marker=".", ms=3.5)
        for place, marker, size in ((0, "o", 6), (-1, "*", 11)):
            axes.plot(*points[place], marker=marker, ms=size, mfc=PATH, mec=LIGHT, mew=0.8, ls="")
        set_title(axes, f"loss · {label}", WIDTH - LEFT - 0.2)
        style_axes(axes, "along the first step", "across it", FONT)
        axes.grid(visible=False)
        ticks = np.geomspace(low, high, 4).tolist()
        bar_axes = spot.axes(LEFT + side + 0.12, BOTTOM, 0.1, side)
        add_color_bar(image, bar_axes, ticks, [f"{tick:.2g}" for tick in ticks])

    return draw


def _by_iteration(number: int, shown: Found) -> Draw:
    label, own = shown[number]

    def draw(spot: Spot) -> None:
        axes = spot.axes(LEFT, BOTTOM, WIDTH - LEFT - 0.2, HEIGHT - BOTTOM - 0.4)
        for _, path in (*shown[:number], *shown[number + 1 :]):
            axes.plot(path.iterations, _values(path), color=AXIS, lw=1.0, alpha=0.6)
        color = PALETTE[0].light
        axes.plot(own.iterations, _values(own), color=color, lw=2.0, marker="o", ms=3)
        set_title(axes, label, WIDTH - LEFT - 0.2)
        name = "test accuracy (%)" if own.accuracy else "test loss"
        style_axes(axes, "iteration", name, FONT)
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        ticks = [t for t in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if t <= own.iterations[-1]]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.margins(x=0.03)

    return draw
