"""Defines every chart once, in Vega-Lite: the page and its pictures draw the same definition."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedhet.report.blocks import Chart, Key, Spec
from fedhet.report.colors import AXIS, GRID, INK, PAGE, PALETTE, STYLES

COUNTED = ("round", "tensor", "layer")  # labels of x whose ticks are whole numbers
EARLY = 0.1  # of a curve's range of x: the steep start does not decide the range of y
_SIZES = {1: (560, 300), 2: (400, 240), 3: (262, 180)}  # a panel's size by panels in a row
_DOTS = (300, 260)  # the size of a chart of dots, or wider
_MARKERS = ("circle", "square", "diamond", "triangle-up")  # of dots by style
_LETTER, _SAMPLE = 6.5, 50  # pixels of a legend's letter, and of what is beside a label
_AXIS = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal", "labelFontSize": 11}
CONFIG = {
    "font": "sans-serif",
    "background": PAGE.light,
    "view": {"stroke": None},
    "concat": {"spacing": 16},
    "axis": {**_AXIS, "domainColor": AXIS, "tickColor": AXIS, "gridColor": GRID},
    "title": {"color": INK, "fontSize": 12, "anchor": "start", "offset": 8},
    "legend": {
        "labelColor": INK,
        "labelFontSize": 12,
        "titleColor": INK,
        "labelLimit": 0,
        "symbolOpacity": 1,
    },
}


@dataclass(frozen=True, eq=False)
class Curve:
    """A line over x with its band; a single run has no band.

    A run that is not completed has a line of its own, which ends with a cross.
    """

    key: Key
    points: pd.DataFrame  # by x: mean, low and high, and other x by the axis's label
    runs: int
    completed: bool = True

    @classmethod
    def of(
        cls, key: Key, by_run: Sequence[pd.DataFrame], *, completed: bool = True
    ) -> Curve | None:
        """Return the curve of several runs where all of them have x; None without such points.

        Args:
            key: the line's colour and style.
            by_run: y by x, and other x by the axis's label; an axis that lacks a point is left out.
            completed: whether the runs are completed.
        """
        if not by_run:
            return None
        if len(by_run) == 1:  # its own mean: grouping would take most of a report's time
            points = by_run[0].dropna(axis="columns").sort_index()
            low = high = points["y"]
        else:
            found = pd.concat(by_run)
            everywhere = found.groupby(level=0)["y"].transform("size") == len(by_run)
            groups = found[everywhere].dropna(axis="columns").groupby(level=0)
            points, low, high = groups.mean(), groups["y"].min(), groups["y"].max()
        if points.empty:
            return None
        points = points.rename(columns={"y": "mean"}).assign(low=low, high=high)
        return cls(key, points, len(by_run), completed)


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[float] = ()  # dotted horizontal lines, such as targets
    y_range: tuple[float, float] | None = None  # None: as the curves need
    log: bool = False  # the scale of y


def common_range(
    curves: Sequence[Curve], marks: Sequence[float] = (), *, log: bool = False
) -> tuple[float, float] | None:
    """Return a range of y for all curves and marks; ``log``: on a logarithmic scale.

    The first tenth of a curve does not widen it, so that late differences can be seen; of two
    points both do.
    """
    ends = list(marks)
    for points in (line.points for line in curves):
        first, last = points.index[0], points.index[-1]
        late = points[points.index >= first + EARLY * (last - first)]
        shown = late if len(late) > 1 else points
        ends += [float(shown["low"].min()), float(shown["high"].max())]
    if not curves:
        return None
    low, high = min(ends), max(ends)
    if log:
        factor = (high / low) ** 0.04 if high > low else 2.0
        return low / factor, high * factor
    margin = 0.04 * (high - low) or abs(high) or 1.0
    return low - margin, high + margin


def gallery(
    panels: Sequence[Panel], caption: str, stem: Path, kinds: Mapping[str, str], abreast: int = 3
) -> Chart:
    """Return panels as a chart, which has a picture over each axis.

    ``kinds`` has the endings of the pictures' names by the axis's label, the first that of x.
    ``abreast`` panels are in a row. More lines than colours make several pictures: ``_rounds``,
    ``_rounds_2``. An axis that no line has is left out.
    """
    first = panels[0].x_label
    keys = list({line.key.label: line.key for p in panels for line in p.curves}.values())
    known = {first, *(label for p in panels for line in p.curves for label in line.points)}
    labels = [label for label in kinds if label in known]
    pictures = {
        f"{stem.name}_{kinds[label]}{f'_{part + 1}' if part else ''}": _lines(
            panels, axis, label, chosen, abreast
        )
        for axis, label in enumerate(labels)
        for part, chosen in enumerate(_without_equal_colors(keys))
    }
    shown = {
        label: _lines(panels, axis, label, keys, abreast, live=True)
        for axis, label in enumerate(labels)
    }
    return Chart(caption, shown, pictures, rows_of(_points(panels, labels)))


def _without_equal_colors(keys: Sequence[Key]) -> list[list[Key]]:
    """Return the lines of each picture."""
    groups: list[list[Key]] = []
    for key in keys:
        free = [group for group in groups if key.color not in {other.color for other in group}]
        groups += [] if free else [[]]
        (free or groups[-1:])[0].append(key)
    return groups


def _points(panels: Sequence[Panel], labels: Sequence[str]) -> pd.DataFrame:
    """Return the points of all panels; ``x0``, ``x1``, ... are the axes."""
    axes = {label: f"x{number}" for number, label in enumerate(labels)}
    points, about = [], []
    for number, panel in enumerate(panels):
        for place, line in enumerate(panel.curves):
            thinner = place / max(1, len(panel.curves) - 1)  # equal lines stay visible
            end = "" if len(line.points) > 1 else "circle"
            points.append(line.points)
            about.append(
                {
                    "line": line.key.label,
                    "runs": line.runs,
                    "panel": number,
                    "curve": place,
                    "width": 2.4 - thinner if line.completed else 1.0,
                    "end": end if line.completed else "cross",
                }
            )
    found = pd.concat(points, keys=range(len(points)), names=["of", "x0"]).reset_index()
    found = found.rename(columns={"mean": "y", **axes}).join(pd.DataFrame(about), on="of")
    found.loc[found["runs"] == 1, ["low", "high"]] = None  # a single run has no band
    found["symbol"] = found["end"].where(~found["of"].duplicated(keep="last"), "")
    return found.drop(columns=["of", "end"]).dropna(axis="columns", how="all")


def rows_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Return a frame as ``columns`` and ``data``, with six digits of each number."""
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    shown = [[float(f"{v:.6g}") if isinstance(v, float) else v for v in row] for row in rows]
    return {"columns": list(frame.columns), "data": shown}


def _lines(
    panels: Sequence[Panel],
    axis: int,
    x_label: str,
    keys: Sequence[Key],
    abreast: int,
    *,
    live: bool = False,
) -> Spec:
    """Define the panels with the lines of these keys; a live chart answers the reader."""
    drawn = [(n, p) for n, p in enumerate(panels) if any(c.key in keys for c in p.curves)]
    width, height = _SIZES[min(abreast, len(drawn), 3)]
    colors = line_colors(keys, min(abreast, len(drawn)) * width)
    views = [
        {
            "title": textwrap.wrap(panel.title, width // 7),
            **{"width": width, "height": height},
            "transform": [{"filter": f"datum.panel == {number}"}],
            "layer": _layers(panel, f"x{axis}", x_label, colors, _choices(place) if live else []),
        }
        for place, (number, panel) in enumerate(drawn)
    ]
    labels = [key.label for key in keys]
    shown = [{"filter": {"field": "line", "oneOf": labels}}]
    return {"transform": shown, "concat": views, "columns": abreast, "config": CONFIG}


def _choices(place: int) -> list[Spec]:
    """Let a reader enlarge a panel, and choose lines by the legend."""
    zoom = {"type": "interval", "zoom": "wheel![event.ctrlKey]"}
    chosen = {"type": "point", "fields": ["line"], "toggle": "true"}
    legend = [] if place else [{"name": "chosen", "select": chosen, "bind": "legend"}]
    return [{"name": f"zoom{place}", "select": zoom, "bind": "scales"}, *legend]


def _layers(
    panel: Panel, x: str, x_label: str, colors: Spec, choices: Sequence[Spec]
) -> list[dict[str, Any]]:
    """Define a panel's lines, bands, ends and marks; with choices a reader can point at lines."""
    scale: dict[str, Any] = {"type": "log"} if panel.log else {"zero": False}
    if panel.y_range:
        scale |= {"domain": panel.y_range, "nice": False}

    def y(field: str) -> dict[str, Any]:
        axis = {"tickCount": 5, **({"format": "~g"} if panel.log else {})}
        return number(field, panel.y_label) | {"scale": scale, "axis": axis}

    across = number(x, x_label) | {"scale": {"zero": False, "nice": False}}
    across["axis"] = {"grid": False, "tickCount": 6}
    if x_label in COUNTED:
        across["axis"] |= {"tickMinStep": 1, "format": "d"}
    base = {"x": across, "y": y("y"), "color": colors["color"], "detail": {"field": "curve"}}
    width = {"field": "width", "type": "quantitative", "scale": None, "legend": None}
    line = {**base, "strokeDash": colors["strokeDash"], "strokeWidth": width}
    faded = {"condition": {"param": "chosen", "value": 1}, "value": 0.04}
    opacity = {"opacity": faded} if choices else {}
    band = {**base, "y": y("low"), "y2": {"field": "high"}, **opacity}
    ends = {**base, "shape": {"field": "symbol", "scale": None, "legend": None}, **opacity}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "clip": True}, "encoding": {**line, **opacity}},
        {
            "transform": [{"filter": "datum.runs > 1"}],
            "mark": {"type": "area", "fillOpacity": 0.16, "clip": True},
            "encoding": band,
        },
        {
            "transform": [{"filter": "datum.symbol"}],
            "mark": {"type": "point", "filled": True, "size": 45, "clip": True},
            "encoding": ends,
        },
    ]
    if panel.marks:
        dotted = {"type": "rule", "strokeDash": [1, 3], "color": AXIS}
        values = [{"mark": mark} for mark in panel.marks]
        layers.append({"data": {"values": values}, "mark": dotted, "encoding": {"y": y("mark")}})
    if choices:
        numbers = {x: x_label, "y": panel.y_label or "value", "low": "lowest", "high": "highest"}
        numbers["runs"] = "runs"
        said = [{"field": name, "title": text, "format": ".4~g"} for name, text in numbers.items()]
        invisible = {"type": "point", "filled": True, "size": 90, "opacity": 0, "clip": True}
        pointed = {**line, "tooltip": [{"field": "line"}, *said]}
        layers.append({"mark": invisible, "encoding": pointed})
        layers[0]["params"] = choices
    return layers


def number(field: str, title: str) -> dict[str, Any]:
    """Return the encoding of a numeric column."""
    return {"field": field, "type": "quantitative", "title": title}


def line_colors(keys: Sequence[Key], width: float) -> Spec:
    """Return the encodings of colour and dashes, which share a legend above the panels."""
    labels = [key.label for key in keys]
    columns = max(1, int(width / (_SAMPLE + _LETTER * max(map(len, labels)))))
    legend = {"orient": "top", "columns": columns, "symbolType": "stroke", "symbolSize": 300}
    hues = {"domain": labels, "range": [PALETTE[key.color].light for key in keys]}
    dashes = {"domain": labels, "range": [STYLES[key.style] for key in keys]}
    base = {"field": "line", "type": "nominal", "title": None, "legend": legend}
    return {"color": {**base, "scale": hues}, "strokeDash": {**base, "scale": dashes}}


def dots(columns: Sequence[str], keys: Sequence[Key], title: str) -> Spec:
    """Define a dot for each line and column, with a bar from low to high, and a ring."""
    width = max(_DOTS[0], 14 * len(columns) * (len(keys) + 1))
    color = line_colors(keys, width)["color"]
    labels = [key.label for key in keys]
    axis = {"labelAngle": 0, "labelExpr": "split(datum.label, ', ')", "labelLimit": 0}
    x = {"field": "column", "sort": list(columns), "title": None, "axis": axis}
    aside = {"field": "line", "sort": labels}
    shape = {"domain": labels, "range": [_MARKERS[key.style] for key in keys]}
    markers = {"field": "line", "scale": shape, "title": None, "legend": color["legend"]}
    color["legend"].pop("symbolType")
    said = [{"field": "line"}, *(number(name, name) for name in ("mean", "low", "high", "paper"))]
    y = number("mean", title) | {"scale": {"zero": False}}
    bars = {
        "mark": {"type": "rule", "strokeWidth": 1.6, "opacity": 0.5},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
    }
    means = {
        "mark": {"type": "point", "filled": True, "size": 40, "opacity": 1},
        "encoding": {"shape": markers},
    }
    rings = {
        "transform": [{"filter": "isValid(datum.paper)"}],
        "mark": {"type": "point", "size": 90, "strokeWidth": 1.2, "opacity": 1},
        "encoding": {"y": {**y, "field": "paper"}, "shape": markers},
    }
    return {
        **{"width": width, "height": _DOTS[1], "config": CONFIG},
        "encoding": {"x": x, "xOffset": aside, "color": color, "y": y, "tooltip": said},
        "layer": [bars, means, rings],
    }
