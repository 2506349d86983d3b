"""The galleries of a page; each is also saved as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from fedhet.common.metrics import is_of_new_model
from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Entry, Heading, Key, Listing, Paragraph, Picture, Table
from fedhet.report.curves import (
    Curve,
    Panel,
    common_range,
    gallery,
    new_figure,
    over_bytes,
    over_runs,
    save,
)
from fedhet.report.data_file import AGREEMENT, Partition
from fedhet.report.layout import NO_COLUMN, Layout, cells_with_runs
from fedhet.report.partition_plot import draw_partition
from fedhet.report.run_data import Run
from fedhet.report.tables import cell_table

# Columns that are shown elsewhere, or are not figures of a round.
NO_DIAGNOSTICS = ("round", "accuracy", "elapsed_seconds", "clients", *AGREEMENT)
MOST_DIAGNOSTICS = 40  # small panels of a section


def accuracy(
    layout: Layout,
    keys: Mapping[str, Key],
    last_round: int | None,
    targets: Sequence[float],
    stem: Path,
) -> list[Block]:
    """Return accuracy over rounds and over bytes, a panel per column."""
    if not can_plot():
        return []

    def percentages(run: Run) -> dict[float, float]:
        return {r: 100 * y for r, y in over_rounds(run, "accuracy").items() if r <= last}

    last = last_round or math.inf
    done = curves_of(layout, keys, percentages)
    cut = incomplete_curves(layout, keys, percentages)
    found = [whole + part for whole, part in zip(done, cut, strict=True)]
    most = [run.bytes_until(10**9) for lines in found for _, runs in lines for run in runs]
    unit, unit_name = (1e9, "GB") if max(most, default=0) >= 2e9 else (1e6, "MB")
    sent = [[(over_bytes(line, runs, unit), runs) for line, runs in lines] for lines in found]
    label, marks = "test accuracy (%)", [100 * target for target in targets]
    range_of = common_range([line for lines in found for line, _ in lines])
    by_round = panels_of(layout, found, "round", label, marks, range_of)
    bytes_label = f"{unit_name} up and down, all clients"
    by_bytes = panels_of(layout, sent, bytes_label, label, marks, range_of)
    if not by_round:
        return []
    dotted = " Dotted: the targets." if marks else ""
    dotted += " A cross: the end of a run that is not completed." if any(cut) else ""
    abreast = 2 if len(by_round) in (2, 4) else 3
    first = f"Accuracy on the test set over rounds. {lines_are(by_round)}{dotted}"
    second = f"The same over the bytes that all clients have sent and received.{dotted}"
    return [
        Heading(3, "Accuracy over rounds"),
        gallery(by_round, first, stem, "rounds", abreast),
        Heading(3, "Accuracy over bytes"),
        gallery(by_bytes, second, stem, "bytes", abreast),
    ]


def over_rounds(run: Run, column: str) -> dict[float, float]:
    """Return a column of a run by round."""
    return {float(round): value for round, value in run.points(column)}


def curves_of(
    layout: Layout, keys: Mapping[str, Key], points: Callable[[Run], Mapping[float, float]]
) -> list[list[tuple[Curve, Sequence[Run]]]]:
    """Return the lines of each column with their runs; ``points`` returns a run's y by x."""
    return [
        [
            (drawn, line.cells[number].runs)
            for line in layout.lines
            if (drawn := over_runs(keys[line.label], [points(r) for r in line.cells[number].runs]))
        ]
        for number in range(len(layout.columns))
    ]


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
    """Return every other numeric column that all runs share, as small multiples."""
    if not can_plot():
        return []
    runs = [run for _, _, cell in cells_with_runs(layout) for run in cell.runs]
    shared = [
        name
        for name in runs[0].columns
        if name not in NO_DIAGNOSTICS and all(run.points(name) for run in runs)
        if not is_of_new_model(name)  # they have a part of the page
    ]
    steady = [name for name in shared if all(_is_steady(run, name) for run in runs)]
    panels = _columns_over_rounds(layout, keys, [name for name in shared if name not in steady])
    blocks: list[Block] = [Heading(3, "Per round")]
    if panels:
        shown = panels[:MOST_DIAGNOSTICS]
        caption = f"Columns of metrics.jsonl, which docs/running.md explains. {lines_are(shown)}"
        if every > 1:
            caption += f" One round in {every} is drawn."
        if len(shown) < len(panels):
            caption += f" {len(panels) - len(shown)} further panels are left out."
        abreast = len(layout.columns) if len(layout.columns) in (2, 4) else 3
        blocks.append(gallery(shown, caption, stem, "diagnostics", abreast))
    if steady:
        blocks.append(_steady_table(layout, steady))
    return blocks


def metrics(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str], stem: Path
) -> list[Block]:
    """Return each metric over rounds, a panel per column."""
    if not can_plot():
        return []
    panels = _columns_over_rounds(layout, keys, [name for name in names if "/" not in name])
    if not panels:
        return []
    caption = f"On the test set; client_: mean over the clients, on theirs. {lines_are(panels)}"
    abreast = len(layout.columns) if len(layout.columns) in (2, 4) else 3
    return [gallery(panels, caption, stem, "metrics", abreast)]


def _columns_over_rounds(
    layout: Layout, keys: Mapping[str, Key], names: Sequence[str]
) -> list[Panel]:
    """Return a panel for each column of metrics.jsonl and of the layout."""
    panels = []
    for name in names:
        found = curves_of(layout, keys, partial(over_rounds, column=name))
        for panel in panels_of(layout, found, "round", ""):
            title = f"{name} · {panel.title}" if panel.title else name
            panels.append(replace(panel, title=title))
    return panels


def _is_steady(run: Run, name: str) -> bool:
    return len({value for round, value in run.points(name) if round > 0}) <= 1


def _steady_table(layout: Layout, names: Sequence[str]) -> Table:
    rows = []
    for _, _, cell in cells_with_runs(layout):
        means = [fmean(run.points(name)[-1][1] for run in cell.runs) for name in names]
        rows.append([Entry(f"{m:,.0f}" if abs(m) >= 10_000 else f"{m:.6g}") for m in means])
    caption = "Constant over the rounds of each run; the mean over the seeds."
    return cell_table(layout, names, rows, caption)


def partitions(found: Sequence[Partition], stem: Path) -> list[Block]:
    """Return how many examples of each class the clients hold, and what could not be counted."""
    if not found:
        return []
    shown = [p for p in found if not p.error] if can_plot() else []
    blocks: list[Block] = [Heading(2, "Who holds which classes")]
    if any(partition.settings.get("partition.seed") is None for partition in shown):
        blocks.append(Paragraph("Each seed draws its own partition; the first one is shown."))
    for number, partition in enumerate(shown, 1):
        path = stem.with_name(f"{stem.name}_partition_{number}")
        blocks.append(_draw_partition(partition, path))
    if missing := [f"{p.title}: {p.error}" for p in found if p.error]:
        blocks += [Paragraph("Not available here:"), Listing(missing)]
    return blocks


def _draw_partition(partition: Partition, path: Path) -> Picture:
    counts, title = np.asarray(partition.counts), partition.title
    figure = new_figure(5.6, 4.4, layout="constrained")
    draw_partition(figure, counts, partition.class_names, title, most_ticks=20, numbered=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # no new layout for each file
    few = len(counts) < partition.clients
    first = f" The first {len(counts)} of {partition.clients} clients." if few else ""
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    parts = [
        f"{what} per client: {each.min()} to {each.max()}, median {np.median(each):.0f}"
        for what, each in (("Examples", sizes), ("classes", held))
    ]
    return save(figure, path, f"{title}.{first} {'; '.join(parts)}.", themed=False)
