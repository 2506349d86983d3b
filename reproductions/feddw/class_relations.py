"""Plots soft labels beside the relations of the classifier's weight (FedDW, Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading, Table
from fedhet.report.colors import AXIS, INK
from fedhet.report.data_file import Partition
from fedhet.report.layout import Layout, first_runs
from fedhet.report.names import plain
from fedhet.report.paper_figures import Partitions
from fedhet.report.run_data import Run
from fedhet.reproductions.color_bar import LABELS, add_color_bar
from fedhet.reproductions.feddw.classifier_data import MILLION, Array, Relations, relations_of
from fedhet.reproductions.pictures import FONT, Draw, Spot, picture_grid, set_title, shortened

MOST_SHOWN = 12  # runs
MOST_NUMBERED = 10  # classes with numbers in the cells
MOST_NAMED = 20  # classes; of more, every tenth has its number on the axes
COLORS = "YlGnBu"
SIDE, LEFT, TOP = 3.0, 0.85, 0.4  # inches: of a matrix, and beside and above it
SMALLEST = 1e-4  # least lower end of the scale

Limits = tuple[float, float]  # of a logarithmic scale of colours


@dataclass(frozen=True)
class Matrices:
    """A run's two matrices (C, C), with the names of its classes."""

    label: str
    soft_labels: Array
    head: Array
    names: Sequence[str]


def relations_section(layout: Layout, partitions: Partitions, stem: Path) -> list[Block]:
    """Return SL and CR of each cell's first run with soft labels, and their distance."""
    found = first_runs(layout, relations_of)
    if not found:
        return []
    blocks: list[Block] = [Heading(3, "Class relations")]
    if can_plot():
        shown = [_matrices(*each, partitions) for each in found[:MOST_SHOWN]]
        soft_limits = _limits([run.soft_labels for run in shown])
        head_limits = _limits([run.head for run in shown])
        bottom = 0.8 if any(_upright(_ticks(run.names)) for run in shown) else 0.3
        pictures = []
        for run in shown:
            kinds = (("SL", run.soft_labels, soft_limits), ("CR", run.head, head_limits))
            for kind, matrix, limits in kinds:
                title = f"{kind} · {run.label}"
                pictures.append(_heatmap(title, matrix, limits, run.names, bottom))
        caption = _caption([(label, run) for label, run, _ in found], shown)
        path = stem.with_name(f"{stem.name}_relations")
        blocks.append(picture_grid(pictures, caption, path, bottom + SIDE + TOP))
    return [*blocks, _table([(label, each) for label, _, each in found])]


def _matrices(
    label: str, run: Run, relations: Relations, partitions: Sequence[Partition]
) -> Matrices:
    soft_labels = np.asarray(relations.soft_labels) / MILLION
    head = np.asarray(relations.head) / MILLION
    task = run.settings.get("task.name")
    named = [p.class_names for p in partitions if p.settings.get("task.name") == task]
    fitting = [names for names in named if len(names) == len(head)]
    numbers = [str(number) for number in range(len(head))]
    return Matrices(label, soft_labels, head, fitting[0] if fitting else numbers)


def _limits(matrices: Sequence[Array]) -> dict[int, Limits]:
    """Return for each number of classes the scale of all entries off the diagonal."""
    limits = {}
    for classes in {len(matrix) for matrix in matrices}:
        off = ~np.eye(classes, dtype=bool)
        entries = np.concatenate([matrix[off] for matrix in matrices if len(matrix) == classes])
        low = max(SMALLEST, float(np.percentile(entries, 5)))
        limits[classes] = low, max(1.5 * low, float(entries.max()))
    return limits


def _caption(found: Sequence[tuple[str, Run]], shown: Sequence[Matrices]) -> str:
    words = [
        "SL, left: the mean soft label of each class's examples over all clients, after the last "
        "round; a row per class. CR, right: the row softmax of W W' of the global classifier's "
        "weight. All SL have one scale of colours, and all CR another; both are logarithmic, from "
        "the 5th percentile of the entries off the diagonal to the largest. Entries beyond, as on "
        "most of the diagonal, have the colour of the end."
    ]
    if any(len(run.names) <= MOST_NUMBERED for run in shown):
        words.append("Numbers are percentages.")
    if len({len(run.names) for run in shown}) > 1:
        words.append("Tasks with another number of classes have their own scales.")
    if plain := [label for label, run in found if run.settings.get("strategy.feddw.mu") == 0]:
        words.append(
            f"mu is 0 in {'; '.join(plain)}: there FedDW is FedAvg with a classifier without bias."
        )
    words.append("Of runs that differ only in the seed, the first is shown.")
    if len(shown) < len(found):
        words.append(f"{len(found) - len(shown)} further runs are only in the table.")
    return " ".join(words)


def _table(found: Sequence[tuple[str, Relations]]) -> Table:
    rows = []
    for label, relations in found:
        correlation = relations.rank_correlation
        text = "-" if correlation is None else f"{correlation:.2f}"
        rows.append([label, f"{relations.distance:.3g}", text])
    caption = (
        "Distance of SL and CR: the mean of the squared differences of all entries, FedDW's eq. 11 "
        "without mu, and Spearman's rank correlation of the entries off the diagonal."
    )
    columns = ["", "mean of (SL - CR)²", "rank correlation off the diagonal"]
    return Table(pd.DataFrame(rows, columns=columns), caption)


def _heatmap(
    title: str, matrix: Array, limits: Mapping[int, Limits], names: Sequence[str], bottom: float
) -> Draw:
    low, high = limits[len(matrix)]

    def draw(spot: Spot) -> None:
        from matplotlib.colors import LogNorm

        axes = spot.axes(LEFT, bottom, SIDE, SIDE)
        shown = np.clip(matrix, low, high)  # log 0 would leave a hole
        image = axes.imshow(shown, cmap=COLORS, norm=LogNorm(low, high), interpolation="none")
        set_title(axes, title, SIDE + 0.5)
        ticks = _ticks(names)
        labels = list(map(plain, ticks.values()))
        axes.set_xticks(list(ticks), labels, rotation=90 if _upright(ticks) else 0)
        axes.set_yticks(list(ticks), labels)
        axes.tick_params(**LABELS)
        axes.set_ylabel("class", fontsize=FONT, color=INK, labelpad=3)
        axes.spines[:].set_color(AXIS)
        if len(matrix) <= MOST_NUMBERED:
            for (row, column), entry in np.ndenumerate(matrix):
                color = "#ffffff" if entry > np.sqrt(low * high) else "#1c2733"
                text = _percent(float(entry))
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
        ticks_at = np.geomspace(low, high, 5).tolist()
        texts = [f"{float(f'{100 * tick:.2g}'):g}" for tick in ticks_at]
        bar = add_color_bar(image, spot.axes(LEFT + SIDE + 0.1, bottom, 0.1, SIDE), ticks_at, texts)
        bar.ax.set_title("%", fontsize=FONT - 1, color=INK, pad=5)

    return draw


def _ticks(names: Sequence[str]) -> dict[int, str]:
    """Return the labels of the axes by class."""
    if len(names) <= MOST_NAMED:
        return {number: shortened(name, 11) for number, name in enumerate(names)}
    return {number: str(number) for number in range(0, len(names), 10)}


def _upright(ticks: Mapping[int, str]) -> bool:
    return max(map(len, ticks.values())) > 2


def _percent(share: float) -> str:
    """Return at most three characters: 86, 2.5 or 0."""
    percent = 100 * share
    return "0" if percent < 0.05 else f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
