"""The chart of runs of a single round, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from fedhet.report.blocks import Block, Chart, Heading, Key
from fedhet.report.charts import CONFIG, line_colors, number, rows_of
from fedhet.report.layout import Layout
from fedhet.report.run_data import score_of
from fedhet.report.statistics import Figure

WIDTH, HEIGHT = 300, 260
MARKERS = ("circle", "square", "diamond", "triangle-up")  # by style


def single_round(layout: Layout) -> bool:
    """Return whether no run has more than one round: there is no curve to draw."""
    runs = [run for cell in layout.cells for run in (*cell.runs, *cell.others)]
    score = score_of(runs)
    return score is None or all(round <= 1 for run in runs for round, _ in run.points(score))


def scores(layout: Layout, keys: Mapping[str, Key], figure: Figure, stem: Path) -> list[Block]:
    """Return the columns and rows that have runs as a chart of dots."""
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
    spec = _spec(columns, shown, figure.title)
    name = f"{stem.name}_scores"
    chart = Chart(" ".join(words), {"": spec}, {name: spec}, rows_of(pd.DataFrame(rows)))
    return [Heading(3, f"{figure.title[0].upper()}{figure.title[1:]}"), chart]


def _spec(columns: list[str], keys: list[Key], title: str) -> dict[str, Any]:
    width = max(WIDTH, 14 * len(columns) * (len(keys) + 1))
    color = line_colors(keys, width)["color"]
    labels = [key.label for key in keys]
    axis = {"labelAngle": 0, "labelExpr": "split(datum.label, ', ')", "labelLimit": 0}
    x = {"field": "column", "sort": columns, "title": None, "axis": axis}
    aside = {"field": "line", "sort": labels}
    shape = {"domain": labels, "range": [MARKERS[key.style] for key in keys]}
    markers = {"field": "line", "scale": shape, "title": None, "legend": color["legend"]}
    color["legend"].pop("symbolType")
    said = [{"field": "line"}, *(number(name, name) for name in ("mean", "low", "high", "paper"))]
    y = number("mean", title) | {"scale": {"zero": False}}
    bars = {
        "mark": {"type": "rule", "strokeWidth": 1.6, "opacity": 0.5},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
    }
    dots = {
        "mark": {"type": "point", "filled": True, "size": 40, "opacity": 1},
        "encoding": {"shape": markers},
    }
    rings = {
        "transform": [{"filter": "isValid(datum.paper)"}],
        "mark": {"type": "point", "size": 90, "strokeWidth": 1.2, "opacity": 1},
        "encoding": {"y": {**y, "field": "paper"}, "shape": markers},
    }
    return {
        **{"width": width, "height": HEIGHT, "config": CONFIG},
        "encoding": {"x": x, "xOffset": aside, "color": color, "y": y, "tooltip": said},
        "layer": [bars, dots, rings],
    }
