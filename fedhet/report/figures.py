"""The galleries of a page; each is also saved as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from fedhet.plot import can_plot
from fedhet.report.blocks import (
    Block,
    Entry,
    Heading,
    Key,
    Listing,
    Paragraph,
    Picture,
    Table,
)
from fedhet.report.curves import (
    Curve,
    Panel,
    common_range,
    curve,
    gallery,
    new_figure,
    over_bytes,
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
    found = curves_of(layout, keys, "accuracy", last_round, scale=100)
    y_range = common_range([line for lines in found for line, _ in lines])
    most = [run.bytes_until(10**9) for lines in found for _, runs in lines for run in runs]
    unit, unit_name = (1e9, "GB") if max(most, default=0) >= 2e9 else (1e6, "MB")
    marks = [100 * target for target in targets]
    by_round, by_bytes = [], []
    for column, lines in zip(layout.columns, found, strict=True):
        if not lines:
            continue
        title = "" if column == NO_COLUMN else column
        label = "test accuracy (%)"
        plain = [line for line, _ in lines]
        sent = [over_bytes(line, runs, unit) for line, runs in lines]
        by_round.append(Panel(title, "round", label, plain, marks, y_range))
        by_bytes.append(
            Panel(title, f"{unit_name} up and down, all clients", label, sent, marks, y_range)
        )
    if not by_round:
        return []
    dotted = " Dotted: the targets." if marks else ""
    abreast = 2 if len(by_round) in (2, 4) else 3
    over_rounds = f"Accuracy on the test set over rounds. {lines_are(by_round)}{dotted}"
    over_sent = f"The same over the bytes that all clients have sent and received.{dotted}"
    return [
        Heading(3, "Accuracy over rounds"),
        gallery(by_round, over_rounds, stem, "rounds", abreast),
        Heading(3, "Accuracy over bytes"),
        gallery(by_bytes, over_sent, stem, "bytes", abreast),
    ]


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
    ]
    steady = [name for name in shared if all(_is_steady(run, name) for run in runs)]
    panels = [
        Panel(name if column == NO_COLUMN else f"{name} · {column}", "round", "", lines)
        for name in shared
        if name not in steady
        for column, pairs in zip(layout.columns, curves_of(layout, keys, name), strict=True)
        if (lines := [line for line, _ in pairs])
    ]
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


def _is_steady(run: Run, name: str) -> bool:
    return len({value for round, value in run.points(name) if round > 0}) <= 1


def _steady_table(layout: Layout, names: Sequence[str]) -> Table:
    rows = []
    for _, _, cell in cells_with_runs(layout):
        means = [fmean(run.points(name)[-1][1] for run in cell.runs) for name in names]
        rows.append([Entry(_plain_number(mean)) for mean in means])
    caption = "Constant over the rounds of each run; the mean over the seeds."
    return cell_table(layout, names, rows, caption)


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.6g}"


def curves_of(
    layout: Layout,
    keys: Mapping[str, Key],
    column: str,
    last_round: int | None = None,
    scale: float = 1.0,
) -> list[list[tuple[Curve, Sequence[Run]]]]:
    """Return the lines with their runs, for each column of the layout."""
    found = []
    for number in range(len(layout.columns)):
        lines: list[tuple[Curve, Sequence[Run]]] = []
        for line in layout.lines:
            runs = line.cells[number].runs
            drawn = curve(keys[line.label], runs, column, scale=scale, last_round=last_round)
            if drawn is not None:
                lines.append((drawn, runs))
        found.append(lines)
    return found


# ---- partitions ----------------------------------------------------------------------------------


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
    counts = np.asarray(partition.counts)
    figure = new_figure(5.6, 4.4, layout="constrained")
    draw_partition(
        figure, counts, partition.class_names, partition.title, most_ticks=20, numbered=False
    )
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # no new layout for each file
    return save(figure, path, _partition_caption(partition), themed=False)


def _partition_caption(partition: Partition) -> str:
    counts = np.asarray(partition.counts)
    words = [f"{partition.title}."]
    if len(counts) < partition.clients:
        words.append(f"The first {len(counts)} of {partition.clients} clients.")
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    parts = [
        f"{what} per client: {each.min()} to {each.max()}, median {np.median(each):.0f}"
        for what, each in (("Examples", sizes), ("classes", held))
    ]
    return f"{' '.join(words)} {'; '.join(parts)}."
