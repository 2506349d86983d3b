"""How classes relate: soft labels beside the classifier's weight (Liu et al., FedDW, Figure 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Entry, Heading, Table
from fedhet.report.curves import AXIS, INK
from fedhet.report.data_file import Partition
from fedhet.report.layout import Layout, first_runs
from fedhet.report.run_data import Run
from fedhet.report.side_by_side import FONT, Picture, Spot, pair_gallery, set_title, shortened
from reproductions.feddw.classifier_data import MILLION, Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SHOWN = 12  # runs
MOST_NUMBERED = 10  # classes whose entries are written into the cells
MOST_NAMED = 20  # classes; of more every tenth has its number on the axes
COLORS = "YlGnBu"
SIDE, LEFT, TOP = 3.0, 0.85, 0.4  # inches: of a matrix, and beside and above it
SMALLEST = 1e-4  # where the scale starts, at the least


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale of colours; what is beyond has the colour of its end."""

    low: float
    high: float


@dataclass(frozen=True)
class Shown:
    """A run's two matrices (C, C), with the names of its classes."""

    label: str
    soft_labels: Array
    head: Array
    names: Sequence[str]


def class_relations(
    layout: Layout, partitions: Callable[[], Sequence[Partition]], stem: Path
) -> list[Block]:
    """Return SL and CR of each cell's first run that keeps soft labels, and how close they are.

    Args:
        layout: rows and columns.
        partitions: returns who holds which classes, for these have names.
        stem: how the picture's name begins.
    """
    found = first_runs(layout, lambda run: run.relations is not None)
    if not found:
        return []
    blocks: list[Block] = [Heading(3, "Class relations")]
    if can_plot():
        shown = [_shown(label, run, partitions()) for label, run in found[:MOST_SHOWN]]
        soft_scales = _scales([run.soft_labels for run in shown])
        head_scales = _scales([run.head for run in shown])
        bottom = 0.8 if any(_upright(_ticks(run.names)) for run in shown) else 0.3
        pairs = [
            (
                _heatmap(f"SL · {run.label}", run.soft_labels, soft_scales, run.names, bottom),
                _heatmap(f"CR · {run.label}", run.head, head_scales, run.names, bottom),
            )
            for run in shown
        ]
        path = stem.with_name(f"{stem.name}_relations")
        height = bottom + SIDE + TOP
        blocks.append(pair_gallery(pairs, _caption(found, shown), path, height))
    return [*blocks, _table(found)]


def _shown(label: str, run: Run, partitions: Sequence[Partition]) -> Shown:
    assert run.relations is not None
    soft_labels = np.asarray(run.relations.soft_labels) / MILLION
    head = np.asarray(run.relations.head) / MILLION
    names = next(
        (
            partition.class_names
            for partition in partitions
            if partition.settings.get("task.name") == run.settings.get("task.name")
            and len(partition.class_names) == len(head)
        ),
        [str(number) for number in range(len(head))],
    )
    return Shown(label, soft_labels, head, names)


def _scales(matrices: Sequence[Array]) -> dict[int, Scale]:
    """Return for each number of classes a scale over all entries off the diagonal."""
    scales = {}
    for classes in {len(matrix) for matrix in matrices}:
        off = ~np.eye(classes, dtype=bool)
        entries = np.concatenate([matrix[off] for matrix in matrices if len(matrix) == classes])
        low = max(SMALLEST, float(np.percentile(entries, 5)))
        scales[classes] = Scale(low, max(1.5 * low, float(entries.max())))
    return scales


def _caption(found: Sequence[tuple[str, Run]], shown: Sequence[Shown]) -> str:
    words = [
        "SL, left: the mean soft label of each class's examples over all clients, after the last "
        "round; a row a class. CR, right: the row softmax of W W' of the global classifier's "
        "weight. All SL have one scale of colours, and all CR another; they are logarithmic, and "
        "made for the entries off the diagonal: from their 5th percentile to the largest. What is "
        "beyond, as the diagonal mostly is, has the colour of the end."
    ]
    if any(len(run.names) <= MOST_NUMBERED for run in shown):
        words.append("Numbers are percentages.")
    if len({len(run.names) for run in shown}) > 1:
        words.append("Tasks of another number of classes have scales of their own.")
    idle = [label for label, run in found if run.settings.get("strategy.feddw.mu") == 0]
    if idle:
        words.append(
            f"mu is 0 in {'; '.join(idle)}: there FedDW is FedAvg with a classifier without bias."
        )
    words.append("Of runs that differ in the seed alone the first is shown.")
    if len(shown) < len(found):
        words.append(f"{len(found) - len(shown)} further runs are only in the table.")
    return " ".join(words)


def _table(found: Sequence[tuple[str, Run]]) -> Table:
    rows = []
    for label, run in found:
        assert run.relations is not None
        correlation = run.relations.rank_correlation
        rows.append(
            [
                Entry(label),
                Entry(f"{run.relations.distance:.3g}"),
                Entry("-" if correlation is None else f"{correlation:.2f}"),
            ]
        )
    return Table(
        ["", "mean of (SL - CR)²", "rank correlation off the diagonal"],
        rows,
        "How close SL and CR are: the mean over all entries of their squared difference, which is "
        "FedDW's eq. 11 without mu, and Spearman's rank correlation of their entries off the "
        "diagonal.",
    )


# ---- drawing -------------------------------------------------------------------------------------


def _heatmap(
    title: str, matrix: Array, scales: dict[int, Scale], names: Sequence[str], bottom: float
) -> Picture:
    scale = scales[len(matrix)]
    return Picture(title, lambda spot: _draw(spot, title, matrix, scale, names, bottom))


def _draw(
    spot: Spot, title: str, matrix: Array, scale: Scale, names: Sequence[str], bottom: float
) -> None:
    from matplotlib.colors import LogNorm

    axes = spot.axes(LEFT, bottom, SIDE, SIDE)
    # clipped: a logarithm of zero would leave a hole
    image = axes.imshow(
        np.clip(matrix, scale.low, scale.high),
        cmap=COLORS,
        norm=LogNorm(scale.low, scale.high),
        interpolation="none",
    )
    set_title(axes, title, SIDE + 0.5)
    _name_classes(axes, names)
    axes.spines[:].set_color(AXIS)
    if len(matrix) <= MOST_NUMBERED:
        _write_numbers(axes, matrix, scale)
    bar = spot.figure.colorbar(image, cax=spot.axes(LEFT + SIDE + 0.1, bottom, 0.1, SIDE))
    ticks = np.geomspace(scale.low, scale.high, 5)
    bar.set_ticks(
        ticks.tolist(), labels=[f"{float(f'{100 * tick:.2g}'):g}" for tick in ticks], minor=False
    )
    bar.minorticks_off()
    bar.ax.set_title("%", fontsize=FONT - 1, color=INK, pad=5)
    bar.ax.tick_params(labelsize=FONT - 1, labelcolor=INK, color=AXIS, length=2, pad=2)
    bar.outline.set_edgecolor(AXIS)


def _name_classes(axes: Axes, names: Sequence[str]) -> None:
    ticks = _ticks(names)
    axes.set_xticks(list(ticks), list(ticks.values()), rotation=90 if _upright(ticks) else 0)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(labelsize=FONT - 1, labelcolor=INK, color=AXIS, length=2, pad=2)
    axes.set_ylabel("class", fontsize=FONT, color=INK, labelpad=3)


def _ticks(names: Sequence[str]) -> dict[int, str]:
    """Return what stands at which class."""
    if len(names) <= MOST_NAMED:
        return {number: shortened(name, 11) for number, name in enumerate(names)}
    return {number: str(number) for number in range(0, len(names), 10)}


def _upright(ticks: dict[int, str]) -> bool:
    return max(map(len, ticks.values())) > 2


def _write_numbers(axes: Axes, matrix: Array, scale: Scale) -> None:
    middle = np.sqrt(scale.low * scale.high)
    for row, entries in enumerate(matrix):
        for column, entry in enumerate(entries):
            color = "#ffffff" if entry > middle else "#1c2733"
            text = _percent(float(entry))
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)


def _percent(share: float) -> str:
    """Return at most three letters: 86, 2.5 or 0."""
    percent = 100 * share
    if percent < 0.05:
        return "0"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
