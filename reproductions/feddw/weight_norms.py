"""Plots the norms of clients' classifier weights against their class shares (FedDW, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading, Table, not_available
from fedhet.report.colors import AXIS, INK, PALETTE
from fedhet.report.data_file import Partition
from fedhet.report.layout import Layout, first_runs
from fedhet.report.names import plain
from fedhet.report.paper_figures import Partitions
from fedhet.report.partitions import partition_of
from fedhet.reproductions.feddw.classifier_data import (
    Array,
    HeadNorms,
    head_norms_of,
    rank_correlation,
)
from fedhet.reproductions.pictures import (
    FONT,
    WIDTH,
    Draw,
    Spot,
    picture_grid,
    set_title,
    shortened,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SHOWN = 12  # runs
MOST_CIRCLES = 10  # classes of a client
MOST_NAMED = 20  # classes; of more, the numbers are shown
MOST_POINTS = 1500  # as vectors; more are drawn as an image
HEIGHT = 3.6
LARGEST = 560.0  # points^2, of a circle
OTHERS = 6  # colour of the clients that are not picked


@dataclass(frozen=True)
class ClassifierNorms:
    """A run's clients that have examples and a head of their own."""

    label: str  # of the run
    clients: Sequence[int]  # ids
    shares: Array  # (clients, C), of a client's examples in each class
    norms: Array  # (clients, C), ||w_c|| / sum_k ||w_k||
    names: Sequence[str]  # of the classes

    def correlations(self, *, held: bool = False) -> list[float | None]:
        """Return each client's rank correlation of share and norm; ``held``: of its classes."""
        found = []
        for shares, norms in zip(self.shares, self.norms, strict=True):
            counted = shares > 0 if held else np.full(len(shares), True)
            found.append(rank_correlation(shares[counted], norms[counted]))
        return found

    def picked(self) -> list[int]:
        """Return the rows with the lowest, the median and the highest correlation."""
        found = self.correlations()
        known = [row for row, value in enumerate(found) if value is not None]
        ranked = sorted(known, key=lambda row: found[row] or 0.0) or list(range(len(found)))
        places = (0, (len(ranked) - 1) // 2, len(ranked) - 1)
        return list(dict.fromkeys(ranked[place] for place in places))


def norms_section(layout: Layout, partitions: Partitions, stem: Path) -> list[Block]:
    """Return class shares against weight norms, for runs whose clients have their own heads."""
    runs = first_runs(layout, head_norms_of)
    if not runs or not partitions:
        return []
    found, missing = [], []
    for label, run, heads in runs:
        partition = partition_of(run, partitions)
        if partition is None or partition.error:
            reason = partition.error if partition else "its partition is not counted"
            missing.append(f"{label}: {reason}")
        else:
            found.append(_norms(label, heads, partition))
    blocks: list[Block] = [Heading(3, "Weight norms and class shares")]
    if found and can_plot():
        shown = found[:MOST_SHOWN]
        pictures = [picture for norms in shown for picture in (_scatter(norms), _circles(norms))]
        path = stem.with_name(f"{stem.name}_norms")
        blocks.append(picture_grid(pictures, _caption(found, shown), path, HEIGHT))
    blocks += [_table(found)] if found else []
    return blocks + not_available(missing)


def _norms(label: str, heads: HeadNorms, partition: Partition) -> ClassifierNorms:
    counts = np.asarray(partition.counts, dtype=np.float64)
    pairs = zip(heads.clients, heads.norms, strict=True)
    kept = [(c, n) for c, n in pairs if c < len(counts) and counts[c].sum() > 0 and sum(n) > 0]
    clients = [client for client, _ in kept]
    norms, held = np.asarray([norms for _, norms in kept]), counts[clients]
    shares = held / held.sum(axis=1, keepdims=True)
    relative = norms / norms.sum(axis=1, keepdims=True)
    return ClassifierNorms(label, clients, shares, relative, partition.class_names)


def _table(found: Sequence[ClassifierNorms]) -> Table:
    rows = []
    for norms in found:
        every = [value for value in norms.correlations() if value is not None]
        held = [value for value in norms.correlations(held=True) if value is not None]
        negative = f"{sum(value < 0 for value in every)} of {len(every)}"
        means = [f"{np.mean(values):.2f}" if values else "-" for values in (every, held)]
        rows.append([norms.label, *means, negative])
    heads = ["", "rank correlation", "of held classes alone", "clients with a negative one"]
    caption = (
        "Spearman's rank correlation of class share and weight norm over a client's classes, the "
        "mean over the clients; then over the classes that a client holds, if at least two. "
        "FedDW's section III-B says that it is negative for a classifier without bias."
    )
    return Table(pd.DataFrame(rows, columns=heads), caption)


def _caption(found: Sequence[ClassifierNorms], shown: Sequence[ClassifierNorms]) -> str:
    words = [
        "Left: every class of every client: its share of the client's examples, and the norm of "
        "its weight, relative to the sum over all classes; dotted: all equal. In colour, and on "
        "the right: the clients with the lowest, the median and the highest rank correlation of "
        "the two. Right: the area of a circle is the share, a hollow circle has no examples, from "
        "the largest share to the smallest; above each its class, below it the relative norm (%)."
    ]
    if any(norms.shares.shape[1] > MOST_CIRCLES for norms in shown):
        words.append(f"Of many classes {MOST_CIRCLES} are drawn, at equal steps of that order.")
    words.append("Of runs that differ only in the seed, the first is shown.")
    if len(shown) < len(found):
        words.append(f"{len(found) - len(shown)} further runs are only in the table.")
    return " ".join(words)


def _scatter(norms: ClassifierNorms) -> Draw:
    def draw(spot: Spot) -> None:
        axes = spot.axes(0.6, 0.5, WIDTH - 0.75, HEIGHT - 0.85)
        picked = norms.picked()
        others = [row for row in range(len(norms.clients)) if row not in picked]
        axes.axhline(100 / norms.norms.shape[1], color=AXIS, lw=0.9, ls=(0, (1, 2)), zorder=0.5)
        groups = ((OTHERS, others, 12), *((c, [row], 26) for c, row in enumerate(picked)))
        for color, rows, size in groups:
            axes.scatter(
                100 * norms.shares[rows],
                100 * norms.norms[rows],
                s=size,
                color=PALETTE[color].light,
                alpha=0.5 if color == OTHERS else 0.9,
                lw=0,
                rasterized=norms.norms[rows].size > MOST_POINTS,
            )
        set_title(axes, norms.label, WIDTH - 0.75)
        style_axes(axes, "share of the client's examples (%)", "relative weight norm (%)", FONT)

    return draw


def _circles(norms: ClassifierNorms) -> Draw:
    def draw(spot: Spot) -> None:
        correlations = norms.correlations()
        height = HEIGHT / 3
        for number, row in enumerate(norms.picked()):
            bottom = HEIGHT - (number + 1) * height + 0.05
            axes = spot.axes(0.15, bottom, WIDTH - 0.3, height - 0.35)
            color, correlation = PALETTE[number].light, correlations[row]
            suffix = "" if correlation is None else f": rank correlation {correlation:.2f}"
            set_title(axes, f"client {norms.clients[row]}{suffix}", WIDTH - 0.3, color)
            _draw_row(axes, norms.shares[row], norms.norms[row], norms.names, color)

    return draw


def _draw_row(axes: Axes, shares: Array, norms: Array, names: Sequence[str], color: str) -> None:
    """Draw one client's classes from the largest share to the smallest."""
    order = np.argsort(-shares, kind="stable")
    steps = np.linspace(0, len(order) - 1, min(len(order), MOST_CIRCLES))
    chosen = order[steps.round().astype(int)]
    held = shares[chosen] > 0
    areas = np.maximum(8.0, LARGEST * shares[chosen] / shares.max())
    axes.scatter(
        range(len(chosen)),
        np.zeros(len(chosen)),
        s=np.where(held, areas, 30.0),
        facecolor=[color if full else "none" for full in held],
        edgecolor=[color if full else AXIS for full in held],
        lw=0.9,
    )
    few = len(norms) <= MOST_NAMED
    for place, label in enumerate(chosen):
        name = shortened(names[label], 7) if few else str(label)
        norm = f"{100 * norms[label]:.{1 if few else 2}f}"
        for height, text in ((1.0, name), (-1.0, norm)):
            axes.text(place, height, plain(text), ha="center", va="center", fontsize=7, color=INK)
    axes.set_xlim(-0.6, MOST_CIRCLES - 0.4)
    axes.set_ylim(-1.3, 1.3)
    axes.set_axis_off()
