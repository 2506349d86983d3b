"""Tables and the plot of the prediction sets of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedhet.report.blocks import Block, Heading, Key, Paragraph, Table, can_draw
from fedhet.report.charts import Curve, Panel, common_range, gallery
from fedhet.report.colors import keys_of
from fedhet.report.layout import NO_COLUMN, Cell, Layout
from fedhet.report.statistics import mean_text
from fedhet.report.tables import cell_table
from fedhet.tasks.conformal.scores import coverage_band
from fedhet.tasks.conformal.sketch import Grid, bytes_down, bytes_up
from fedhet.tools.conformal.measure import MeasuredSets, Options, RunSets

Found = Mapping[int, RunSets]  # by the run's id()
DRAWN, SIZE = "RAPS", "mean size of the sets"


def page(
    layout: Layout, found: Found, options: Options, reference: float | None, stem: Path
) -> list[Block]:
    """Return the page, and write its plot; ``reference`` is a centralised top-1 in [0, 1]."""
    explained = (
        f"A random half of each test set calibrates, the other half is counted; {options.splits} "
        f"splits, seed {options.seed}. {options.temperature_share:.0%} of the calibrating half "
        "are for the temperature alone. Scores: APS, and RAPS with lambda 0.01 and k_reg 1 (5 with "
        "100 classes), both randomised; sets may be empty."
    )
    blocks: list[Block] = [Heading(1, "Conformal prediction"), Paragraph(explained)]
    if can_draw():
        caption = (
            f"Coverage over the mean size of the sets, with {DRAWN}, at many levels. Line: mean "
            "over the splits (and seeds). Band: from the lowest to the highest. Dotted: the "
            "reference."
        )
        kinds = {SIZE: "coverage"}
        chart = gallery(_panels(layout, found, reference), caption, stem, kinds)
        chart.save(stem.parent)
        blocks.append(chart)
    blocks.append(_table(layout, found, options, reference))
    if options.federated:
        blocks += [Heading(2, "At the clients"), _federated_table(layout, found, options)]
    return blocks


def _panels(layout: Layout, found: Found, reference: float | None) -> list[Panel]:
    keys = keys_of(list(layout.methods.items()))
    marks = [] if reference is None else [100 * reference]
    by_column = [
        [_curve(keys[cell.row], cell, found) for cell in layout.column(column) if cell.runs]
        for column in layout.columns
    ]
    y_range = common_range([line for lines in by_column for line in lines], marks)
    return [
        Panel("" if column == NO_COLUMN else column, SIZE, "coverage (%)", lines, marks, y_range)
        for column, lines in zip(layout.columns, by_column, strict=True)
        if lines
    ]


def _curve(key: Key, cell: Cell, found: Found) -> Curve:
    """Return coverage over mean size; runs with different levels are averaged by position."""
    measured = [found[id(run)].centralised[DRAWN] for run in cell.runs]
    places = min(len(one.levels) for one in measured)
    coverage = np.concatenate([np.asarray(one.coverage)[:, :places] for one in measured])
    size = np.concatenate([np.asarray(one.size)[:, :places] for one in measured])
    points = 100 * pd.DataFrame(coverage).agg(["mean", "min", "max"]).T
    points = points.set_axis(["mean", "low", "high"], axis="columns")
    return Curve(key, points.set_axis(size.mean(axis=0)), len(coverage))


def _table(layout: Layout, found: Found, options: Options, reference: float | None) -> Table:
    heads = ["top-1 (%)", "temperature"]
    for name in ("APS", "RAPS"):
        heads += [f"{name} coverage (%)", f"{name} size"]
    heads += [f"size at {100 * reference:.4g} %"] if reference is not None else []
    rows = []
    for cell in layout.measured:
        sets = [found[id(run)] for run in cell.runs]
        row = [
            mean_text([100 * one.accuracy for one in sets], 1),
            mean_text([one.centralised["APS"].temperature for one in sets], 2),
        ]
        for name in ("APS", "RAPS"):
            row += _coverage_and_size([one.centralised[name] for one in sets], options.alpha)
        if reference is not None:
            row.append(_size_at(reference, [one.centralised[DRAWN] for one in sets]))
        rows.append(row)
    one = next(iter(found.values())).centralised["APS"]
    low, high = coverage_band(one.calibration, one.evaluation, options.alpha)
    caption = (
        f"Sets that are to cover {1 - options.alpha:.4g}; mean ± sample standard deviation over "
        f"the splits (of all seeds). The theoretical 95 % band of one split is {100 * low:.1f} to "
        f"{100 * high:.1f} % ({one.calibration} scores, {one.evaluation} examples)."
    )
    if reference is not None:
        caption += f" Last: the mean size with {DRAWN} that covers the reference's top-1."
    return cell_table(layout, pd.DataFrame(rows, columns=heads), caption)


def _federated_table(layout: Layout, found: Found, options: Options) -> Table:
    heads, rows = ["calibrating"], []
    for name in ("APS", "RAPS"):
        heads += [f"{name} coverage (%)", f"{name} size", f"{name} pooled (%)", "size"]
    for cell in layout.measured:
        sets = [found[id(run)] for run in cell.runs]
        row = [mean_text([one.sketched["APS"].calibration for one in sets], 0)]
        for name in ("APS", "RAPS"):
            for kind in ("sketched", "pooled"):
                measured = [getattr(one, kind)[name] for one in sets]
                row += _coverage_and_size(measured, options.alpha)
        rows.append(row)
    caption = (
        "Clients calibrate on their held-out examples; the whole test set is counted. A client "
        f"sends {bytes_up(Grid(1.0, options.bins)):,} bytes, its log loss at each of a grid of "
        f"temperatures and {options.bins} + 1 counts, and gets {bytes_down()} beside the model. "
        "Pooled: with the scores themselves, which would have to be sent. With few calibrating "
        "examples the coverage varies more; all splits share them."
    )
    return cell_table(layout, pd.DataFrame(rows, columns=heads), caption)


def _coverage_and_size(measured: Sequence[MeasuredSets], alpha: float) -> list[str]:
    coverage = [100 * value for one in measured for value in one.at(alpha)[0]]
    sizes = [value for one in measured for value in one.at(alpha)[1]]
    return [mean_text(coverage, 1), mean_text(sizes, 2)]


def _size_at(reference: float, measured: Sequence[MeasuredSets]) -> str:
    sizes = [size for one in measured if (size := size_covering(reference, one)) is not None]
    return mean_text(sizes, 2) if len(sizes) == len(measured) else "outside the levels"


def size_covering(reference: float, measured: MeasuredSets) -> float | None:
    """Return the mean size that covers so much, interpolated linearly; None outside the levels."""
    coverage = np.asarray(measured.coverage).mean(axis=0)[::-1]  # ascending
    size = np.asarray(measured.size).mean(axis=0)[::-1]
    if not coverage[0] <= reference <= coverage[-1]:
        return None
    return float(np.interp(reference, coverage, size))
