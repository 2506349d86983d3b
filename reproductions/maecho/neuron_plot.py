"""Where the clients' neurons lie, before a fusion and in it (MA-Echo, Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Entry, Heading, Key, Table
from fedhet.report.colors import PALETTE
from fedhet.report.curves import AXIS
from fedhet.report.layout import Layout, first_runs
from fedhet.report.side_by_side import WIDTH, Picture, Spot, picture_gallery, set_title
from reproductions.maecho.fusion_path import Neurons, Stage

MOST_SHOWN = 6  # runs
MOST_NUMBERED = 400  # neurons that are drawn as numbers; of more each is a dot
HEIGHT = 4.4  # inches

Shown = Sequence[tuple[str, Neurons]]


def neurons(layout: Layout, stem: Path) -> list[Block]:
    """Return the neurons of each cell's first run that was fused again.

    Args:
        layout: rows and columns.
        stem: how the picture's name begins.
    """
    runs = first_runs(layout, lambda run: run.neurons is not None)
    found = [(label, run.neurons) for label, run in runs if run.neurons is not None]
    if not found:
        return []
    blocks: list[Block] = [Heading(3, "Neurons")]
    if can_plot():
        pictures = [
            _picture(label, of_run, Stage(**stage))
            for label, of_run in found[:MOST_SHOWN]
            for stage in of_run.stages
        ]
        path = stem.with_name(f"{stem.name}_neurons")
        most = max(of_run.clients for _, of_run in found[:MOST_SHOWN])
        legend = [Key(f"client {number}", number) for number in range(min(most, len(PALETTE)))]
        blocks.append(picture_gallery(pictures, _caption(found), path, HEIGHT, legend))
    return [*blocks, _table(found)]


def _caption(found: Shown) -> str:
    words = [
        f"The rows of {found[0][1].layer}, a number a neuron, a colour a client, by t-SNE, for "
        "each picture anew: only what lies together means something, not where. In parentheses: "
        "the mean accuracy of the clients' models on their own examples. In MA-Echo's pictures "
        "the clients' layers are the V_i."
    ]
    if len(found) > MOST_SHOWN:
        words.append(f"{len(found) - MOST_SHOWN} further runs are only in the table.")
    return " ".join(words)


def _table(found: Shown) -> Table:
    rows = [
        [
            Entry(label),
            Entry(stage.title),
            Entry(f"{100 * stage.matched:.0f}"),
            Entry("-" if stage.accuracy is None else f"{100 * stage.accuracy:.2f}"),
        ]
        for label, of_run in found
        for stage in (Stage(**values) for values in of_run.stages)
    ]
    return Table(
        ["", "stage", "matched (%)", "accuracy on own examples (%)"],
        rows,
        "Matched: of the other clients' neurons, those to which the first client's neuron of the "
        "same number is nearest.",
        words=2,
    )


# ---- drawing -------------------------------------------------------------------------------------


def _picture(label: str, of_run: Neurons, stage: Stage) -> Picture:
    score = "" if stage.accuracy is None else f" ({100 * stage.accuracy:.1f} %)"
    title = f"{stage.title}{score} · {label}"
    return Picture(title, lambda spot: _draw(spot, title, of_run, stage))


def _draw(spot: Spot, title: str, of_run: Neurons, stage: Stage) -> None:
    side = min(WIDTH, HEIGHT) - 0.5
    axes = spot.axes(0.15, 0.1, WIDTH - 0.3, side)
    points = np.asarray(stage.points)
    numbered = len(points) <= MOST_NUMBERED
    for client in range(of_run.clients):
        color = PALETTE[client % len(PALETTE)].light
        own = points[client * of_run.count : (client + 1) * of_run.count]
        if not numbered:
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
    set_title(axes, title, WIDTH - 0.3)
