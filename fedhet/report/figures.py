"""The charts of a section: each is a few panels of lines, a panel for a column of the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.report.blocks import Block, Chart, Heading, Key, Paragraph, Table, not_available
from fedhet.report.charts import Curve, Panel, common_range, gallery
from fedhet.report.data_file import AGREEMENT, Partition
from fedhet.report.layout import NO_COLUMN, Cell, Layout
from fedhet.report.names import column_title, listed
from fedhet.report.partition_chart import partition_chart
from fedhet.report.run_data import AT_CLIENTS, ON_TEST_SET, Run, evaluation_place, score_of
from fedhet.report.statistics import measured_metrics
from fedhet.report.tables import cell_table

# Columns that are shown elsewhere, or are not figures of a round.
NO_DIAGNOSTICS = (
    *("round", "accuracy", "clients", "elapsed_seconds", "simulated_seconds"),
    *AGREEMENT,
)
MOST_DIAGNOSTICS = 40  # small panels of a section
ROUND = "round"
_PLACES = {ON_TEST_SET: "test {}", AT_CLIENTS: "{} at the clients"}
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))  # the largest unit of which there are two

Points = Callable[[Run], Mapping[float, float]]  # a run's y by x
Units = Mapping[str, tuple[str, float]]  # of other axes, by label: a column of rows, and its unit


def over_rounds(run: Run, column: str) -> dict[float, float]:
    """Return a column of metrics.jsonl by round."""
    return {float(round): value for round, value in run.stored(column)}


def line_panels(
    layout: Layout,
    keys: Mapping[str, Key],
    points: Points,
    labels: tuple[str, str],
    *,
    marks: Sequence[Sequence[float]] = (),
    log: bool = False,
    units: Units | None = None,
    incomplete: bool = False,
) -> list[Panel]:
    """Return a panel for each column that has points, all with the same range of y.

    Args:
        layout: rows are lines, columns are panels.
        keys: the lines' colours and styles by label.
        points: y by x of a run.
        labels: of x and y.
        marks: dotted horizontal lines of each column.
        log: whether y is on a logarithmic scale.
        units: of other axes that lines have.
        incomplete: whether a run that is not completed has a line of its own.
    """
    marks = marks or [()] * len(layout.columns)
    found = [
        _curves(layout.column(column), keys, points, units or {}, incomplete)
        for column in layout.columns
    ]
    shown = [mark for some in marks for mark in some]
    y_range = common_range([line for lines in found for line in lines], shown, log=log)
    return [
        Panel("" if column == NO_COLUMN else column, *labels, lines, own, y_range, log)
        for column, lines, own in zip(layout.columns, found, marks, strict=True)
        if lines
    ]


def _curves(
    cells: Sequence[Cell], keys: Mapping[str, Key], points: Points, units: Units, incomplete: bool
) -> list[Curve]:
    """Return the lines of a column: each row's mean, then the runs that did not complete."""

    def curve(row: str, runs: Sequence[Run], completed: bool) -> Curve | None:
        by_run = [_points(run, values, units) for run in runs if (values := points(run))]
        return Curve.of(keys[row], by_run, completed=completed)

    found = [curve(cell.row, cell.runs, True) for cell in cells]
    if incomplete:
        found += [curve(cell.row, [run], False) for cell in cells for run in cell.others]
    return [line for line in found if line]


def _points(run: Run, values: Mapping[float, float], units: Units) -> pd.DataFrame:
    """Return a run's y by round, and what it has spent until then by the axis's label."""
    found = pd.DataFrame({"y": values})
    for label, (column, unit) in units.items():
        spent = run.bytes_by_round() if column == "bytes" else dict(run.points(column))
        found[label] = pd.Series({0: 0.0, **spent}) / unit
    return found


def lines_are(panels: Sequence[Panel]) -> str:
    """Return what a line and its band mean."""
    if all(line.runs == 1 for panel in panels for line in panel.curves):
        return "Each line is one run."
    return (
        "Line: mean over the seeds. Band: from the lowest to the highest seed; a line without a "
        "band is a single run. A line ends where the shortest of its runs ends."
    )


def abreast(layout: Layout) -> int:
    """Return how many panels are in a row: those of one figure, if they fit."""
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
    panels = line_panels(
        layout,
        keys,
        points,
        (ROUND, _PLACES.get(where, "{}").format(score) + percent),
        marks=[marks] * len(layout.columns),
        units={label: unit for label, (_, unit) in axes.items()},
        incomplete=True,
    )
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
    most = max((run.bytes_until(10**9) for run in runs), default=0)
    unit, name = (1e9, "GB") if most >= 2e9 else (1e6, "MB")
    if most:
        found[f"{name} up and down, all clients"] = ("bytes", ("bytes", unit))
    for column, kind, words in (
        ("elapsed_seconds", "time", "wall time"),
        ("simulated_seconds", "simulated", "simulated time"),
    ):
        if (longest := max((v for r in runs for _, v in r.points(column)), default=0)) > 0:
            unit, name = next((one for one in _TIMES if longest >= 2 * one[0]), _TIMES[-1])
            found[f"{words} ({name})"] = (kind, (column, unit))
    return found


def metrics(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str], stem: Path
) -> list[Block]:
    """Return each metric over rounds, a panel per column."""
    panels = _columns_over_rounds(layout, keys, [name for name in names if "/" not in name])
    if not panels:
        return []
    where = "Client: mean over the clients, on theirs; others: on the test set."
    caption = f"{where} {lines_are(panels)}"
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
    panels = _columns_over_rounds(layout, keys, [name for name in shown if name not in steady])
    blocks: list[Block] = [Heading(3, "Per round")]
    if panels:
        drawn = panels[:MOST_DIAGNOSTICS]
        caption = f"Columns of metrics.jsonl, which docs/running.md explains. {lines_are(drawn)}"
        caption += f" One round in {every} is drawn." if every > 1 else ""
        if len(drawn) < len(panels):
            caption += f" {len(panels) - len(drawn)} further panels are left out."
        blocks.append(gallery(drawn, caption, stem, {ROUND: "diagnostics"}, abreast(layout)))
    if steady:
        blocks.append(_steady_table(layout, steady))
    return blocks


def _columns_over_rounds(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str]
) -> list[Panel]:
    """Return a panel for each column of metrics.jsonl and of the layout."""
    return [
        replace(panel, title=" · ".join(filter(None, [column_title(name), panel.title])))
        for name in names
        for panel in line_panels(layout, keys, partial(over_rounds, column=name), (ROUND, ""))
    ]


def _is_steady(run: Run, name: str) -> bool:
    return len({value for round, value in run.stored(name) if round > 0}) <= 1


def _steady_table(layout: Layout, names: Sequence[str]) -> Table:
    def text(runs: Sequence[Run], name: str) -> str:
        values = [points[-1][1] for run in runs if (points := run.stored(name))]
        mean = math.fsum(values) / len(values) if values else math.nan
        return "-" if not values else f"{mean:,.0f}" if abs(mean) >= 10_000 else f"{mean:.6g}"

    rows = [
        {column_title(name): text(cell.runs, name) for name in names} for cell in layout.measured
    ]
    caption = "Constant over the rounds of each run; the mean over the seeds."
    return cell_table(layout, pd.DataFrame(rows), caption)


def partitions(found: Sequence[Partition], stem: Path) -> list[Block]:
    """Return how many examples of each class the clients hold, and what could not be counted."""
    if not found:
        return []
    shown = [p for p in found if not p.error]
    blocks: list[Block] = [Heading(2, "Partition: who holds which classes")]
    if any(partition.settings.get("partition.seed") is None for partition in shown):
        blocks.append(Paragraph("Each seed draws its own partition; the first one is shown."))
    for number, partition in enumerate(shown, 1):
        chart = _partition_chart(partition, f"{stem.name}_partition_{number}")
        blocks += [Heading(3, partition.title), chart]
    return blocks + not_available([f"{p.title}: {p.error}" for p in found if p.error])


def _partition_chart(partition: Partition, name: str) -> Chart:
    counts = np.asarray(partition.counts)
    few = len(counts) < partition.clients
    words = [f"The first {len(counts)} of {partition.clients} clients."] if few else []
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    words += [
        f"{what} per client: {each.min()} to {each.max()}, median {np.median(each):.0f}."
        for what, each in (("Examples", sizes), ("Classes", held))
    ]
    return partition_chart(counts, partition.class_names, partition.title, " ".join(words), name)
