"""Plots the clients' neurons before a fusion and during it (MA-Echo, Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading, Table
from fedhet.report.colors import AXIS, INK, PALETTE
from fedhet.report.layout import Layout, first_runs
from fedhet.reproductions.maecho.fusion_path import FusedNeurons, Stage, neurons_of
from fedhet.reproductions.pictures import FONT, WIDTH, Draw, Spot, picture_grid, set_title

MOST_SHOWN = 6  # runs
MOST_NUMBERED = 400  # neurons that are drawn as numbers; of more, each is a dot
HEIGHT = 4.4  # inches

Found = Sequence[tuple[str, FusedNeurons]]  # with labels


def neurons(layout: Layout, stem: Path) -> list[Block]:
    """Return the neurons of each cell's first run that has them."""
    found = [(label, each) for label, _, each in first_runs(layout, neurons_of)]
    if not found:
        return []
    blocks: list[Block] = [Heading(3, "Neurons")]
    if can_plot():
        shown = found[:MOST_SHOWN]
        pictures = [_picture(label, each, stage) for label, each in shown for stage in each.stages]
        path = stem.with_name(f"{stem.name}_neurons")
        blocks.append(picture_grid(pictures, _caption(found), path, HEIGHT))
    return [*blocks, _table(found)]


def _caption(found: Found) -> str:
    words = (
        f"The rows of {found[0][1].layer}, a number per neuron, a colour per client, by a t-SNE of "
        "each picture: only neighbourhoods have a meaning, positions have none. In parentheses: "
        "the mean accuracy of the clients' models on their own examples. In MA-Echo's pictures "
        "the clients' layers are the V_i."
    )
    left_out = len(found) - MOST_SHOWN
    return f"{words} {left_out} further runs are only in the table." if left_out > 0 else words


def _table(found: Found) -> Table:
    rows = []
    for label, each in found:
        for stage in each.stages:
            accuracy = "-" if stage.accuracy is None else f"{100 * stage.accuracy:.2f}"
            rows.append([label, stage.title, f"{100 * stage.matched:.0f}", accuracy])
    columns = ["", "stage", "matched (%)", "accuracy on own examples (%)"]
    return Table(
        pd.DataFrame(rows, columns=columns),
        "Matched: the other clients' neurons whose nearest neuron of the first client has the same "
        "number.",
        words=2,
    )


def _picture(label: str, each: FusedNeurons, stage: Stage) -> Draw:
    score = "" if stage.accuracy is None else f" ({100 * stage.accuracy:.1f} %)"
    title = f"{stage.title}{score} · {label}"

    def draw(spot: Spot) -> None:
        axes = spot.axes(0.15, 0.1, WIDTH - 0.3, min(WIDTH, HEIGHT) - 0.5)
        points = np.asarray(stage.points)
        for client in range(each.clients):
            color = PALETTE[client % len(PALETTE)].light
            own = points[client * each.count : (client + 1) * each.count]
            axes.plot([], [], "o", ms=4, color=color, label=f"client {client}")
            if len(points) > MOST_NUMBERED:
                axes.scatter(own[:, 0], own[:, 1], s=5, color=color, lw=0)
                continue
            for number, (x, y) in enumerate(own):
                axes.text(x, y, str(number), fontsize=5.5, color=color, ha="center", va="center")
        low, high = points.min(0), points.max(0)
        margin = 0.04 * (high - low)
        axes.set_xlim(low[0] - margin[0], high[0] + margin[0])
        axes.set_ylim(low[1] - margin[1], high[1] + margin[1])
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(AXIS)
        axes.legend(frameon=False, fontsize=FONT - 1, labelcolor=INK, handletextpad=0)
        set_title(axes, title, WIDTH - 0.3)

    return draw
