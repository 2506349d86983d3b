"""Drift diversity by layer, and how alike the clients' models are (FedPVR, Figures 2 and 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Entry, Heading, Key, Table
from fedhet.report.curves import Curve, Panel, common_range, over_runs
from fedhet.report.data_file import AGREEMENT_ROUNDS
from fedhet.report.figures import gallery, lines_are
from fedhet.report.layout import NO_COLUMN, Layout
from fedhet.report.statistics import over_seeds
from fedhet.report.tables import cell_table
from reproductions.fedpvr.layer_data import LayerFigures

MOST_PICKED = 6  # tensors with a panel, or a column of the table, of their own

LATE = f"the mean over the last {AGREEMENT_ROUNDS} rounds"
LAST = "the mean over all pairs of clients, in the last round"

Points = Mapping[float, float]  # y by x
Take = Callable[[LayerFigures], Points]


def layers(layout: Layout, keys: Mapping[str, Key], stem: Path) -> list[Block]:
    """Return the figures of the layers of those runs that have written them.

    Args:
        layout: rows and columns.
        keys: the lines' colours.
        stem: how the picture's name begins.
    """
    measured = [found for figures in _by_cell(layout) for found in figures]
    moved = [found for found in measured if found.rounds]
    compared = [found for found in measured if found.compared]
    if not moved and not compared:
        return []
    blocks: list[Block] = [Heading(3, "Layers")]
    if moved:
        blocks += _diversity(layout, keys, moved, stem)
    if compared:
        blocks += _similarity(layout, keys, compared, stem)
    return blocks


def _by_cell(layout: Layout) -> list[list[LayerFigures]]:
    """Return what the runs of each cell have written, column after column."""
    return [
        [run.layers for run in line.cells[number].runs if run.layers is not None]
        for number in range(len(layout.columns))
        for line in layout.lines
    ]


# ---- drift diversity -----------------------------------------------------------------------------


def _diversity(
    layout: Layout, keys: Mapping[str, Key], found: Sequence[LayerFigures], stem: Path
) -> list[Block]:
    picked = _picked(found)
    blocks: list[Block] = []
    if can_plot():
        over_layers = _panels(layout, keys, _late, "tensor", "drift diversity", log=True, mark=1.0)
        caption = (
            "Drift diversity of each tensor, the sum of the squared norms of its updates over the "
            f"squared norm of their sum (FedPVR, Definition 1; its Figure 2): {LATE}. "
            "Tensors are counted from 0 in the model's order, "
            "weights and biases apart. Dotted: 1, where updates are orthogonal; equal ones have "
            f"1/|S|. {lines_are(over_layers)}"
        )
        blocks.append(gallery(over_layers, caption, stem, "layers", 3))
        over_rounds = [
            panel
            for name in picked
            for panel in _panels(layout, keys, _over_rounds(name), "round", name, log=True)
        ]
        caption = (
            "The same over rounds (FedPVR, Figure 4), of some of the weights: the first, the last, "
            f"and some between. {lines_are(over_rounds)} Nothing is smoothed."
        )
        blocks.append(gallery(over_rounds, caption, stem, "layers_rounds", 3, small=True))
    norms = _table(layout, picked, _norm_of, f"The clients' mean norm of their updates, {LATE}")
    return [*blocks, _table(layout, picked, _late_of, f"Drift diversity, {LATE}"), norms]


def _picked(found: Sequence[LayerFigures]) -> list[str]:
    """Return evenly spread ones of the weights that all runs have: no biases, no norms."""
    first, *others = found
    names = [first.tensors[place] for place in first.matrices] or list(first.tensors)
    shared = [name for name in names if all(name in other.tensors for other in others)]
    count = min(MOST_PICKED, len(shared))
    if count < 2:
        return shared[-1:]
    return [shared[round(n * (len(shared) - 1) / (count - 1))] for n in range(count)]


def _late(found: LayerFigures) -> Points:
    return {float(n): value for n, value in enumerate(found.late) if value is not None}


def _late_of(found: LayerFigures, name: str) -> float | None:
    return found.late[list(found.tensors).index(name)] if found.rounds else None


def _norm_of(found: LayerFigures, name: str) -> float | None:
    return found.norms[list(found.tensors).index(name)] if found.rounds else None


def _over_rounds(name: str) -> Take:
    def take(found: LayerFigures) -> Points:
        if name not in found.tensors:
            return {}
        place = list(found.tensors).index(name)
        rows = zip(found.rounds, found.diversity, strict=True)
        return {float(r): value for r, row in rows if (value := row[place]) is not None}

    return take


# ---- similarity ----------------------------------------------------------------------------------


def _similarity(
    layout: Layout, keys: Mapping[str, Key], found: Sequence[LayerFigures], stem: Path
) -> list[Block]:
    names = found[0].layers
    blocks: list[Block] = []
    if can_plot() and all(one.layers == names for one in found):
        panels = _panels(layout, keys, _alike, "layer", "linear CKA of clients' models")
        numbered = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        caption = (
            "Linear CKA between the clients' models after local training, on the test set: "
            f"{LAST} (FedPVR, Figure 2); 1: they "
            "represent the examples alike but for rotation and scale. Of maps the mean over "
            f"positions is compared. Layers: {numbered}. {lines_are(panels)}"
        )
        blocks.append(gallery(panels, caption, stem, "similarity", 3))
    step = max(1, -(-len(names) // MOST_PICKED))
    shown = [*names[:-1:step], names[-1]]
    return [*blocks, _table(layout, shown, _alike_of, f"Linear CKA, {LAST}")]


def _alike(found: LayerFigures) -> Points:
    if not found.compared:
        return {}
    return {float(n): value for n, value in enumerate(found.similarity[-1]) if value is not None}


def _alike_of(found: LayerFigures, name: str) -> float | None:
    if name not in found.layers:
        return None
    return found.similarity[-1][list(found.layers).index(name)]


# ---- both ----------------------------------------------------------------------------------------


def _panels(
    layout: Layout,
    keys: Mapping[str, Key],
    take: Take,
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    mark: float | None = None,
) -> list[Panel]:
    """Return a panel a column, all with one range of y."""
    by_column: list[list[Curve]] = []
    for number in range(len(layout.columns)):
        lines = []
        for line in layout.lines:
            runs = [run.layers for run in line.cells[number].runs if run.layers is not None]
            drawn = over_runs(keys[line.label], [p for found in runs if (p := take(found))])
            lines += [drawn] if drawn is not None else []
        by_column.append(lines)
    marks = [] if mark is None else [mark]
    y_range = common_range([line for lines in by_column for line in lines], marks, log=log)
    return [
        Panel("" if column == NO_COLUMN else column, x_label, y_label, lines, marks, y_range, log)
        for column, lines in zip(layout.columns, by_column, strict=True)
        if lines
    ]


def _table(
    layout: Layout,
    names: Sequence[str],
    of: Callable[[LayerFigures, str], float | None],
    what: str,
) -> Table:
    rows = [
        [Entry(_over_seeds([of(found, name) for found in figures])) for name in names]
        for figures, cell in zip(
            _by_cell(layout),
            [line.cells[n] for n in range(len(layout.columns)) for line in layout.lines],
            strict=True,
        )
        if cell.runs
    ]
    return cell_table(layout, names, rows, f"{what}; mean ± sample standard deviation over seeds.")


def _over_seeds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return over_seeds(known).text(3) if known else "-"
