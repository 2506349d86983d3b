"""The charts of a section: each has a panel for every quantity that it shows and every column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from fedhet.report.blocks import Block, Chart, Heading, Key
from fedhet.report.charts import Curve, Panel, common_range, dots, gallery, rows_of
from fedhet.report.data_file import AGREEMENT
from fedhet.report.layer_data import LayerFigures
from fedhet.report.layout import NO_COLUMN, Cell, Layout, only_runs
from fedhet.report.names import column_title, listed
from fedhet.report.run_data import (
    AT_CLIENTS,
    LATE_ROUNDS,
    ON_TEST_SET,
    Run,
    evaluation_place,
    score_of,
)
from fedhet.report.statistics import Figure, measured_metrics
from fedhet.report.tables import values_table

# Columns that are shown elsewhere, or are not figures of a round.
NO_DIAGNOSTICS = (
    *("round", "accuracy", "clients", "elapsed_seconds", "simulated_seconds"),
    *AGREEMENT,
)
MOST_DIAGNOSTICS = 40  # small panels of a section
MOST_PICKED = 6  # tensors with a panel, or a column of the table, of their own
ROUND = "round"
LATE = f"the mean over the last {LATE_ROUNDS} rounds"
LAST = "the mean over all pairs of clients, in the last round"
_SPREAD = "mean ± sample standard deviation over seeds."
_PLACES = {ON_TEST_SET: "test {}", AT_CLIENTS: "{} at the clients"}
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))  # the largest unit of which there are two
_WHERE = "Client: mean over the clients, on theirs; others: on the test set."

Points = Callable[[Run], Mapping[float, float]]  # a run's y by x
Axes = Mapping[str, tuple[str, float]]  # beside x, by label: a column of rows, and its unit


@dataclass(frozen=True)
class Quantity:
    """What a panel shows of each run."""

    points: Points
    y_label: str = ""
    title: str = ""  # of its panels, before the column's name
    x_label: str = ROUND
    log: bool = False  # the scale of y
    marks: Callable[[Sequence[Cell]], Sequence[float]] = lambda cells: ()  # dotted, horizontal


def over_rounds(column: str) -> Points:
    """Return a column of metrics.jsonl by round."""
    return lambda run: {float(round): value for round, value in run.stored(column)}


def line_panels(
    layout: Layout,
    keys: Mapping[str, Key],
    quantities: Sequence[Quantity],
    axes: Axes | None = None,
    *,
    incomplete: bool = False,
) -> list[Panel]:
    """Return a panel for each quantity and column with points; a quantity has one range of y.

    ``incomplete``: whether a run that is not completed has a line of its own.
    """
    found: list[Panel] = []
    for one in quantities:
        columns = [layout.column(column) for column in layout.columns]
        lines = [_curves(cells, keys, one.points, axes or {}, incomplete) for cells in columns]
        marks = [one.marks(cells) for cells in columns]
        every = [line for some in lines for line in some]
        y_range = common_range(every, [mark for some in marks for mark in some], log=one.log)
        for column, curves, own in zip(layout.columns, lines, marks, strict=True):
            title = " · ".join(filter(None, [one.title, column if column != NO_COLUMN else ""]))
            if curves:
                found.append(Panel(title, one.x_label, one.y_label, curves, own, y_range, one.log))
    return found


def _curves(
    cells: Sequence[Cell],
    keys: Mapping[str, Key],
    points: Points,
    axes: Axes,
    incomplete: bool,
) -> list[Curve]:
    """Return the lines of a column: each row's mean, then the runs that did not complete."""

    def curve(row: str, runs: Sequence[Run], completed: bool) -> Curve | None:
        by_run = [_points(run, values, axes) for run in runs if (values := points(run))]
        return Curve.of(keys[row], by_run, completed=completed)

    found = [curve(cell.row, cell.runs, True) for cell in cells]
    if incomplete:
        found += [curve(cell.row, [run], False) for cell in cells for run in cell.others]
    return [line for line in found if line]


def _points(run: Run, values: Mapping[float, float], axes: Axes) -> pd.DataFrame:
    """Return a run's y by round, and what it has spent until then by the axis's label."""
    found = {"y": list(values.values())}
    for label, (column, unit) in axes.items():
        spent = run.spent(column)
        found[label] = [spent.get(int(round), math.nan) / unit for round in values]
    return pd.DataFrame(found, index=list(values), dtype=float)


def lines_are(panels: Sequence[Panel]) -> str:
    """Return what a line and its band mean."""
    if all(line.runs == 1 for panel in panels for line in panel.curves):
        return "Each line is one run."
    return (
        "Line: mean over the seeds. Band: from the lowest to the highest seed; a line without a "
        "band is a single run. A line ends where the shortest of its runs ends."
    )


def abreast(layout: Layout) -> int:
    """Return how many panels are in a row: those of one quantity, if they fit."""
    return len(layout.columns) if len(layout.columns) in (2, 4) else 3


def scores(
    layout: Layout,
    keys: Mapping[str, Key],
    last_round: int | None,
    targets: Sequence[float],
    stem: Path,
    score: str = "accuracy",
) -> list[Block]:
    """Return a score over rounds, wall time, simulated time and bytes, a panel per column.

    ``score`` is accuracy, drawn in percent, or loss, which has no targets.
    """
    scale, percent = (100.0, " (%)") if score == "accuracy" else (1.0, "")
    last = last_round or math.inf

    def points(run: Run) -> dict[float, float]:
        return {float(r): scale * y for r, y in run.points(score) if r <= last}

    drawn = [run for cell in layout.cells for run in (*cell.runs, *cell.others) if points(run)]
    if not drawn:
        return []
    axes, where = _axes(drawn), evaluation_place(drawn, score)
    marks = [scale * target for target in targets] if score == "accuracy" else []
    label = _PLACES.get(where, "{}").format(score) + percent
    quantity = Quantity(points, label, marks=lambda cells: marks)
    spent = {label: column for label, (_, column) in axes.items()}
    panels = line_panels(layout, keys, [quantity], spent, incomplete=True)
    caption = f"{score.capitalize()} {where}. {lines_are(panels)}"
    caption += " Dotted, horizontal: the targets." if marks else ""
    if any(not line.completed for panel in panels for line in panel.curves):
        caption += " A cross: the end of a run that is not completed."
    if axes:
        caption += f" Over {listed(axes)}, x is the mean over the seeds at each round."
    kinds = {ROUND: "rounds", **{label: kind for label, (kind, _) in axes.items()}}
    wide = 2 if len(panels) in (2, 4) else 3
    return [Heading(3, score.capitalize()), gallery(panels, caption, stem, kinds, wide)]


def _axes(runs: Sequence[Run]) -> dict[str, tuple[str, tuple[str, float]]]:
    """Return the axes beside rounds: by label, the ending of a file's name, a column, its unit."""
    found = {}
    for words, kind, column, units in (
        ("{} up and down, all clients", "bytes", "bytes", ((1e9, "GB"), (1e6, "MB"))),
        ("wall time ({})", "time", "elapsed_seconds", _TIMES),
        ("simulated time ({})", "simulated", "simulated_seconds", _TIMES),
    ):
        if most := max((max(run.spent(column).values(), default=0) for run in runs), default=0):
            unit, name = next((one for one in units if most >= 2 * one[0]), units[-1])
            found[words.format(name)] = (kind, (column, unit))
    return found


def single_round(layout: Layout) -> bool:
    """Return whether no run has more than one round: there is no curve to draw."""
    runs = [run for cell in layout.cells for run in (*cell.runs, *cell.others)]
    score = score_of(runs)
    return score is None or all(round <= 1 for run in runs for round, _ in run.points(score))


def single_scores(
    layout: Layout, keys: Mapping[str, Key], figure: Figure, stem: Path
) -> list[Block]:
    """Return the columns and rows of runs of a single round as a chart of dots."""
    rows: list[dict[str, Any]] = []
    for cell in layout.measured:
        measured = [found.number for run in cell.runs if (found := figure.of(run)) is not None]
        if measured:
            row = {"column": cell.column, "line": cell.row, "mean": fmean(measured)}
            row |= {"low": min(measured), "high": max(measured)}
            rows.append(row | {"paper": cell.published[0].mean if cell.published else None})
    if not rows:
        return []
    shown = [keys[row] for row in layout.rows if row in {row["line"] for row in rows}]
    columns = list(dict.fromkeys(row["column"] for row in rows))
    words = ["Dot: mean over the seeds. Bar: from the lowest to the highest seed."]
    if any(row["paper"] is not None for row in rows):
        words.append("Ring beside it: the paper's number.")
    spec = dots(columns, shown, figure.title)
    name = f"{stem.name}_scores"
    chart = Chart(" ".join(words), {"": spec}, {name: spec}, rows_of(pd.DataFrame(rows)))
    return [Heading(3, f"{figure.title[0].upper()}{figure.title[1:]}"), chart]


def _columns(names: Sequence[str]) -> list[Quantity]:
    return [Quantity(over_rounds(name), title=column_title(name)) for name in names]


def metrics(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str], stem: Path
) -> list[Block]:
    """Return each metric over rounds, a panel per column."""
    panels = line_panels(layout, keys, _columns([name for name in names if "/" not in name]))
    if not panels:
        return []
    caption = f"{_WHERE} {lines_are(panels)}"
    return [gallery(panels, caption, stem, {ROUND: "metrics"}, abreast(layout))]


def diagnostics(layout: Layout, keys: Mapping[str, Key], every: int, stem: Path) -> list[Block]:
    """Return every other numeric column that runs have, as small multiples."""
    runs = layout.completed
    names = dict.fromkeys(name for run in runs for name in run.columns)
    elsewhere = {*NO_DIAGNOSTICS, *measured_metrics(runs)}
    if score_of(runs) == "loss":  # it has a chart of its own
        elsewhere |= {"client_loss" if run.at_clients else "loss" for run in runs}
    shown = [name for name in names if name not in elsewhere if any(r.stored(name) for r in runs)]
    steady = [name for name in shown if all(_is_steady(run, name) for run in runs)]
    panels = line_panels(layout, keys, _columns([name for name in shown if name not in steady]))
    blocks: list[Block] = [Heading(3, "Per round")]
    if panels:
        drawn = panels[:MOST_DIAGNOSTICS]
        caption = f"Columns of metrics.jsonl, which docs/running.md explains. {lines_are(drawn)}"
        caption += f" One round in {every} is drawn." if every > 1 else ""
        if len(drawn) < len(panels):
            caption += f" {len(panels) - len(drawn)} further panels are left out."
        blocks.append(gallery(drawn, caption, stem, {ROUND: "diagnostics"}, abreast(layout)))
    if steady:
        titles = {column_title(name): name for name in steady}

        def last(run: Run) -> dict[str, float]:
            points = {title: run.stored(name) for title, name in titles.items()}
            return {title: found[-1][1] for title, found in points.items() if found}

        caption = "Constant over the rounds of each run; the mean over the seeds."
        blocks.append(values_table(layout, list(titles), last, caption, _plain_mean))
    return blocks


def _is_steady(run: Run, name: str) -> bool:
    return len({value for round, value in run.stored(name) if round > 0}) <= 1


def _plain_mean(values: Sequence[float]) -> str:
    mean = fmean(values) if values else math.nan
    return "-" if not values else f"{mean:,.0f}" if abs(mean) >= 10_000 else f"{mean:.6g}"


# ---- how far updates agree (strategies/round/update_diagnostics.py) ------------------------------


def agreement(layout: Layout, keys: Mapping[str, Key], every: int, stem: Path) -> list[Block]:
    """Return the three figures over rounds, one in ``every``, and their means over the last."""
    measured = only_runs(layout, _has_agreement)
    runs = measured.completed
    if not runs:
        return []
    blocks: list[Block] = [Heading(3, "How far updates agree")]
    if any(len(run.points(name)) > 1 for run in runs for name in AGREEMENT):
        several = _cohorts(measured.measured)
        one = f"1/√{several[0]:g}" if len(several) == 1 else "1/√|S|"
        dotted = dict(zip(AGREEMENT, (one, "0", "1"), strict=True))
        quantities = [
            Quantity(
                over_rounds(name),
                y_label=f"{column_title(name)} (dotted: {dotted[name]})",
                log=name == "drift_diversity",  # it has no upper bound: updates may cancel
                marks=_orthogonal(name),
            )
            for name in AGREEMENT
        ]
        panels = line_panels(measured, keys, quantities)
        caption = _about_agreement(panels, runs, every)
        blocks.append(gallery(panels, caption, stem, {ROUND: "agreement"}, abreast(layout)))
    caption = (
        f"Means over the last {LATE_ROUNDS} rounds of a run; mean ± sample standard deviation over "
        "the seeds. Runs without updates, or with one client per round, have no values."
    )
    return [*blocks, values_table(measured, list(map(column_title, AGREEMENT)), _late, caption)]


def _has_agreement(run: Run) -> bool:
    """Return whether a run has the figures, of several clients."""
    several = any(size > 1 for _, size in run.points("clients"))
    return several and any(run.points(name) for name in AGREEMENT)


def _cohorts(cells: Sequence[Cell]) -> list[float]:
    """Return |S|: the median over the rounds of each row, without duplicates."""
    found = [[size for run in cell.runs for size in _replies(run)] for cell in cells]
    return sorted({median(some) for some in found if some})


def _replies(run: Run) -> list[float]:
    """Return |S| of each round that had a valid reply."""
    return [size for _, size in run.points("clients") if size > 0]


def _orthogonal(name: str) -> Callable[[Sequence[Cell]], list[float]]:
    """Return the figure for orthogonal updates of equal length, of a column's |S| clients."""
    if name == "norm_ratio":
        return lambda cells: [1 / math.sqrt(size) for size in _cohorts(cells)]
    return lambda cells: [0.0] if name == "update_cosine" else [1.0]


def _late(run: Run) -> dict[str, float]:
    """Return the means over a run's last rounds of those columns that have values there."""
    last = max(round for round, _ in run.points("round"))
    values = {
        column_title(name): [y for round, y in run.points(name) if round > last - LATE_ROUNDS]
        for name in AGREEMENT
    }
    return {title: fmean(found) for title, found in values.items() if found}


def _about_agreement(panels: Sequence[Panel], runs: Sequence[Run], every: int) -> str:
    sizes = sorted({size for run in runs for size in _replies(run)})
    words = [
        "Norm ratio: the norm of the updates' mean over the mean of their norms, FedMRUR's 1/d_t "
        "(Theorem 1). Pairwise cosine: the mean over all pairs of updates. Drift diversity: the "
        "sum of the squared norms over the squared norm of the sum (FedPVR, Definition 1), on a "
        "logarithmic scale. Each is of one round's updates, over all trainable parameters that "
        "are shared. Dotted: orthogonal updates of equal length, 1/√|S|, 0 and 1; equal updates "
        "have 1, 1 and 1/|S|. S is the set of aggregated clients:",
        f"|S| = {sizes[0]:g}."
        if len(sizes) == 1
        else f"|S| is {sizes[0]:g} to {sizes[-1]:g}; dotted is a row's median over its rounds.",
        f"{lines_are(panels)} Nothing is smoothed.",
    ]
    if every > 1:
        words.append(f"One round in {every} is drawn, and all of the last {LATE_ROUNDS}.")
    return " ".join(words)


# ---- layers (FedPVR, Figures 2 and 4) ------------------------------------------------------------


def layers(layout: Layout, keys: Mapping[str, Key], stem: Path) -> list[Block]:
    """Return drift diversity by layer and the similarity of the clients' models, as measured."""
    found = [run.layers for run in layout.completed]
    measured = [figures for figures in found if figures.rounds]
    compared = [figures for figures in found if figures.compared]
    blocks = _diversity(layout, keys, measured, stem) if measured else []
    blocks += _similarity(layout, keys, compared, stem) if compared else []
    return [Heading(3, "Layers"), *blocks] if blocks else []


def _diversity(
    layout: Layout, keys: Mapping[str, Key], found: Sequence[LayerFigures], stem: Path
) -> list[Block]:
    picked = _picked(found)

    def late(run: Run) -> dict[float, float]:
        return {float(n): value for n, value in enumerate(run.layers.late) if value is not None}

    by_tensor = Quantity(late, "drift diversity", "", "tensor", log=True, marks=lambda cells: [1])
    panels = line_panels(layout, keys, [by_tensor])
    caption = (
        "Drift diversity of each tensor, the sum of the squared norms of its updates over the "
        f"squared norm of their sum (FedPVR, Definition 1; its Figure 2): {LATE}. "
        "Tensors are counted from 0 in the model's order, weights and biases apart. Dotted: 1, "
        f"for orthogonal updates; equal updates have 1/|S|. {lines_are(panels)}"
    )
    quantities = [Quantity(_tensor_over_rounds(name), name, log=True) for name in picked]
    by_round = line_panels(layout, keys, quantities)
    same = (
        "The same over rounds (FedPVR, Figure 4), of some of the weights: the first, the last, "
        f"and some between. {lines_are(by_round)} Nothing is smoothed."
    )
    tables = (
        (f"Drift diversity, {LATE}; {_SPREAD}", lambda run: run.layers.by_tensor(run.layers.late)),
        (
            f"The clients' mean norm of their updates, {LATE}; {_SPREAD}",
            lambda run: run.layers.by_tensor(run.layers.norms),
        ),
    )
    return [
        gallery(panels, caption, stem, {"tensor": "layers"}),
        gallery(by_round, same, stem, {ROUND: "layers_rounds"}),
        *(values_table(layout, picked, values, what) for what, values in tables),
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


def _tensor_over_rounds(name: str) -> Points:
    def points(run: Run) -> dict[float, float]:
        rows = zip(run.layers.rounds, map(run.layers.by_tensor, run.layers.diversity), strict=True)
        return {float(round): values[name] for round, values in rows if name in values}

    return points


def _similarity(
    layout: Layout, keys: Mapping[str, Key], found: Sequence[LayerFigures], stem: Path
) -> list[Block]:
    names = found[0].layers
    blocks: list[Block] = []
    if all(figures.layers == names for figures in found):

        def by_number(run: Run) -> dict[float, float]:
            values = run.layers.last_similarity()
            return {float(n): values[name] for n, name in enumerate(names) if name in values}

        quantity = Quantity(by_number, "linear CKA of clients' models", x_label="layer")
        panels = line_panels(layout, keys, [quantity])
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
    caption = f"Linear CKA, {LAST}; {_SPREAD}"
    return [*blocks, values_table(layout, shown, lambda r: r.layers.last_similarity(), caption)]
