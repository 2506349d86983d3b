"""The charts of a section; each is also saved as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.report.blocks import Block, Chart, Heading, Key, Listing, Paragraph, Table
from fedhet.report.charts import (
    Curve,
    Panel,
    common_range,
    gallery,
    over_runs,
    with_axes,
)
from fedhet.report.data_file import AGREEMENT, Partition
from fedhet.report.layout import NO_COLUMN, Layout, cells_with_runs
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

    def points(run: Run) -> dict[float, float]:
        return {float(r): scale * y for r, y in run.points(score) if r <= last}

    scale, percent = (100.0, " (%)") if score == "accuracy" else (1.0, "")
    last = last_round or math.inf
    done = curves_of(layout, keys, points)
    cut = incomplete_curves(layout, keys, points)
    found = [whole + part for whole, part in zip(done, cut, strict=True)]
    drawn = [run for lines in found for _, runs in lines for run in runs]
    axes, where = _axes(drawn), evaluation_place(drawn, score)
    units = {label: unit for label, (_, unit) in axes.items()}
    found = [[(with_axes(line, runs, units), runs) for line, runs in lines] for lines in found]
    marks = [scale * target for target in targets] if score == "accuracy" else []
    range_of = common_range([line for lines in found for line, _ in lines])
    label = _PLACES.get(where, "{}").format(score) + percent
    panels = panels_of(layout, found, ROUND, label, marks, range_of)
    if not panels:
        return []
    caption = f"{score.capitalize()} {where}. {lines_are(panels)}"
    caption += " Dotted, horizontal: the targets." if marks else ""
    caption += " A cross: the end of a run that is not completed." if any(cut) else ""
    if axes:
        caption += f" Over {listed(axes)}, x is the mean over the seeds at each round."
    kinds = {ROUND: "rounds", **{label: kind for label, (kind, _) in axes.items()}}
    abreast = 2 if len(panels) in (2, 4) else 3
    return [Heading(3, score.capitalize()), gallery(panels, caption, stem, kinds, abreast)]


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


def over_rounds(run: Run, column: str) -> dict[float, float]:
    """Return a column of metrics.jsonl by round."""
    return {float(round): value for round, value in run.stored(column)}


def curves_of(
    layout: Layout, keys: Mapping[str, Key], points: Callable[[Run], Mapping[float, float]]
) -> list[list[tuple[Curve, Sequence[Run]]]]:
    """Return the lines of each column with their runs; ``points`` returns a run's y by x.

    A run without any point is left out.
    """
    found: list[list[tuple[Curve, Sequence[Run]]]] = []
    for number in range(len(layout.columns)):
        found.append([])
        for line in layout.lines:
            with_points = [(run, y) for run in line.cells[number].runs if (y := points(run))]
            drawn = over_runs(keys[line.label], [y for _, y in with_points])
            if drawn is not None:
                found[-1].append((drawn, tuple(run for run, _ in with_points)))
    return found


def incomplete_curves(
    layout: Layout, keys: Mapping[str, Key], points: Callable[[Run], Mapping[float, float]]
) -> list[list[tuple[Curve, Sequence[Run]]]]:
    """Return a line for each run of a column that is not completed, as far as it came."""
    return [
        [
            (replace(drawn, completed=False), [run])
            for line in layout.lines
            for run in line.cells[number].others
            if (drawn := over_runs(keys[line.label], [points(run)]))
        ]
        for number in range(len(layout.columns))
    ]


def panels_of(
    layout: Layout,
    found: Sequence[Sequence[tuple[Curve, Sequence[Run]]]],
    x_label: str,
    y_label: str,
    marks: Sequence[float] = (),
    y_range: tuple[float, float] | None = None,
    log: bool = False,
) -> list[Panel]:
    """Return a panel for each column that has lines."""
    panels = []
    for column, lines in zip(layout.columns, found, strict=True):
        title, curves = "" if column == NO_COLUMN else column, [line for line, _ in lines]
        panels += [Panel(title, x_label, y_label, curves, marks, y_range, log)] if lines else []
    return panels


def lines_are(panels: Sequence[Panel]) -> str:
    """Return what a line and its band mean."""
    if all(line.runs == 1 for panel in panels for line in panel.curves):
        return "Each line is one run."
    return (
        "Line: mean over the seeds. Band: from the lowest to the highest seed; a line without a "
        "band is a single run. A line ends where the shortest of its runs ends."
    )


def diagnostics(layout: Layout, keys: Mapping[str, Key], every: int, stem: Path) -> list[Block]:
    """Return every other numeric column that runs have, as small multiples."""
    runs = [run for _, _, cell in cells_with_runs(layout) for run in cell.runs]
    names = dict.fromkeys(name for run in runs for name in run.columns)
    elsewhere = {*NO_DIAGNOSTICS, *measured_metrics(runs), *_losses_above(runs)}
    shown = [name for name in names if name not in elsewhere if any(r.stored(name) for r in runs)]
    steady = [name for name in shown if all(_is_steady(run, name) for run in runs)]
    panels = _columns_over_rounds(layout, keys, [name for name in shown if name not in steady])
    blocks: list[Block] = [Heading(3, "Per round")]
    if panels:
        drawn = panels[:MOST_DIAGNOSTICS]
        caption = f"Columns of metrics.jsonl, which docs/running.md explains. {lines_are(drawn)}"
        if every > 1:
            caption += f" One round in {every} is drawn."
        if len(drawn) < len(panels):
            caption += f" {len(panels) - len(drawn)} further panels are left out."
        abreast = len(layout.columns) if len(layout.columns) in (2, 4) else 3
        blocks.append(gallery(drawn, caption, stem, {ROUND: "diagnostics"}, abreast))
    if steady:
        blocks.append(_steady_table(layout, steady))
    return blocks


def _losses_above(runs: Sequence[Run]) -> set[str]:
    """Return the columns that ``scores`` draws of runs without an accuracy."""
    if score_of(runs) != "loss":
        return set()
    return {"client_loss" if run.at_clients else "loss" for run in runs}


def metrics(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str], stem: Path
) -> list[Block]:
    """Return each metric over rounds, a panel per column."""
    panels = _columns_over_rounds(layout, keys, [name for name in names if "/" not in name])
    if not panels:
        return []
    caption = (
        f"Client: mean over the clients, on theirs; others: on the test set. {lines_are(panels)}"
    )
    abreast = len(layout.columns) if len(layout.columns) in (2, 4) else 3
    return [gallery(panels, caption, stem, {ROUND: "metrics"}, abreast)]


def _columns_over_rounds(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str]
) -> list[Panel]:
    """Return a panel for each column of metrics.jsonl and of the layout."""
    panels = []
    for name in names:
        found = curves_of(layout, keys, partial(over_rounds, column=name))
        for panel in panels_of(layout, found, ROUND, ""):
            title = column_title(name)
            panels.append(
                replace(panel, title=f"{title} · {panel.title}" if panel.title else title)
            )
    return panels


def _is_steady(run: Run, name: str) -> bool:
    return len({value for round, value in run.stored(name) if round > 0}) <= 1


def _steady_table(layout: Layout, names: Sequence[str]) -> Table:
    def text(runs: Sequence[Run], name: str) -> str:
        values = [points[-1][1] for run in runs if (points := run.stored(name))]
        mean = math.fsum(values) / len(values) if values else math.nan
        return "-" if not values else f"{mean:,.0f}" if abs(mean) >= 10_000 else f"{mean:.6g}"

    rows = [
        {column_title(name): text(cell.runs, name) for name in names}
        for _, _, cell in cells_with_runs(layout)
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
        path = stem.with_name(f"{stem.name}_partition_{number}")
        blocks += [Heading(3, partition.title), _partition_chart(partition, path)]
    if missing := [f"{p.title}: {p.error}" for p in found if p.error]:
        blocks += [Paragraph("Not available here:"), Listing(missing)]
    return blocks


def _partition_chart(partition: Partition, path: Path) -> Chart:
    counts = np.asarray(partition.counts)
    few = len(counts) < partition.clients
    first = [f"The first {len(counts)} of {partition.clients} clients."] if few else []
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    parts = [
        f"{what} per client: {each.min()} to {each.max()}, median {np.median(each):.0f}."
        for what, each in (("Examples", sizes), ("Classes", held))
    ]

    caption, names = " ".join([*first, *parts]), list(partition.class_names)
    return partition_chart(counts, names, partition.title, caption, path.name)
