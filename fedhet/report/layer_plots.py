"""Plots drift diversity by layer, and the similarity of the clients' models (FedPVR, Fig. 2, 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedhet.report.blocks import Block, Heading, Key, Table
from fedhet.report.charts import Panel, gallery
from fedhet.report.figures import line_panels, lines_are
from fedhet.report.layer_data import LayerFigures
from fedhet.report.layout import Cell, Layout
from fedhet.report.run_data import LATE_ROUNDS, Run
from fedhet.report.statistics import mean_text
from fedhet.report.tables import cell_table

MOST_PICKED = 6  # tensors with a panel, or a column of the table, of their own
LATE = f"the mean over the last {LATE_ROUNDS} rounds"
LAST = "the mean over all pairs of clients, in the last round"

ByName = Callable[[LayerFigures], Mapping[str, float]]  # values by tensor or layer
OfLayers = Callable[[LayerFigures], Mapping[float, float]]  # y by x


def layers(layout: Layout, keys: Mapping[str, Key], stem: Path) -> list[Block]:
    """Return the figures by layer of the runs that have them."""
    found = [figures for cell in layout.measured for figures in _of_cell(cell)]
    measured = [figures for figures in found if figures.rounds]
    compared = [figures for figures in found if figures.compared]
    if not measured and not compared:
        return []
    blocks: list[Block] = [Heading(3, "Layers")]
    blocks += _diversity(layout, keys, measured, stem) if measured else []
    blocks += _similarity(layout, keys, compared, stem) if compared else []
    return blocks


def _of_cell(cell: Cell) -> list[LayerFigures]:
    return [run.layers for run in cell.runs if run.layers is not None]


def _diversity(
    layout: Layout, keys: Mapping[str, Key], found: Sequence[LayerFigures], stem: Path
) -> list[Block]:
    picked = _picked(found)

    def late(figures: LayerFigures) -> dict[float, float]:
        return {float(n): value for n, value in enumerate(figures.late) if value is not None}

    by_tensor = _panels(layout, keys, late, ("tensor", "drift diversity"), log=True, marks=[1])
    caption = (
        "Drift diversity of each tensor, the sum of the squared norms of its updates over the "
        f"squared norm of their sum (FedPVR, Definition 1; its Figure 2): {LATE}. "
        "Tensors are counted from 0 in the model's order, weights and biases apart. Dotted: 1, "
        f"for orthogonal updates; equal updates have 1/|S|. {lines_are(by_tensor)}"
    )
    by_round = [
        panel
        for name in picked
        for panel in _panels(layout, keys, _over_rounds(name), ("round", name), log=True)
    ]
    over_rounds = (
        "The same over rounds (FedPVR, Figure 4), of some of the weights: the first, the last, "
        f"and some between. {lines_are(by_round)} Nothing is smoothed."
    )
    norms = f"The clients' mean norm of their updates, {LATE}"
    return [
        gallery(by_tensor, caption, stem, {"tensor": "layers"}),
        gallery(by_round, over_rounds, stem, {"round": "layers_rounds"}),
        _table(layout, picked, lambda f: f.by_tensor(f.late), f"Drift diversity, {LATE}"),
        _table(layout, picked, lambda f: f.by_tensor(f.norms), norms),
    ]


def _picked(found: Sequence[LayerFigures]) -> list[str]:
    """Return weights at even steps, of those that all runs have: no biases, no norms."""
    first, *others = found
    names = [first.tensors[place] for place in first.matrices] or list(first.tensors)
    shared = [name for name in names if all(name in other.tensors for other in others)]
    count = min(MOST_PICKED, len(shared))
    if count < 2:
        return shared[-1:]
    return [shared[round(n * (len(shared) - 1) / (count - 1))] for n in range(count)]


def _over_rounds(name: str) -> OfLayers:
    def points(figures: LayerFigures) -> dict[float, float]:
        rows = zip(figures.rounds, figures.diversity, strict=True)
        by_round = {float(round): figures.by_tensor(row).get(name) for round, row in rows}
        return {round: value for round, value in by_round.items() if value is not None}

    return points


def _similarity(
    layout: Layout, keys: Mapping[str, Key], found: Sequence[LayerFigures], stem: Path
) -> list[Block]:
    names = found[0].layers
    blocks: list[Block] = []
    if all(figures.layers == names for figures in found):

        def by_number(figures: LayerFigures) -> dict[float, float]:
            values = figures.last_similarity()
            return {float(n): values[name] for n, name in enumerate(names) if name in values}

        panels = _panels(layout, keys, by_number, ("layer", "linear CKA of clients' models"))
        numbered = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        caption = (
            "Linear CKA between the clients' models after local training, on the test set: "
            f"{LAST} (FedPVR, Figure 2). At 1 their representations are equal up to rotation and "
            "scale. Feature maps are averaged over positions. "
            f"Layers: {numbered}. {lines_are(panels)}"
        )
        blocks.append(gallery(panels, caption, stem, {"layer": "similarity"}))
    step = max(1, -(-len(names) // MOST_PICKED))
    shown = [*names[:-1:step], names[-1]]
    return [*blocks, _table(layout, shown, LayerFigures.last_similarity, f"Linear CKA, {LAST}")]


def _panels(
    layout: Layout,
    keys: Mapping[str, Key],
    points: OfLayers,
    labels: tuple[str, str],
    *,
    log: bool = False,
    marks: Sequence[float] = (),
) -> list[Panel]:
    """Return a panel per column, all with the same range of y."""

    def by_x(run: Run) -> Mapping[float, float]:
        return points(run.layers) if run.layers else {}

    of_columns = [marks] * len(layout.columns)
    return line_panels(layout, keys, by_x, labels, marks=of_columns, log=log)


def _table(layout: Layout, names: Sequence[str], values: ByName, what: str) -> Table:
    def text(cell: Cell, name: str) -> str:
        found = map(values, _of_cell(cell))
        return mean_text([by_name[name] for by_name in found if name in by_name], 3)

    frame = pd.DataFrame({name: text(cell, name) for name in names} for cell in layout.measured)
    caption = f"{what}; mean ± sample standard deviation over seeds."
    return cell_table(layout, frame, caption)
