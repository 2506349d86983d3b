"""The parts of a page, before they are Markdown or HTML."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pandas as pd


def can_draw() -> bool:
    """Return whether the extra `plots` is installed."""
    return find_spec("vl_convert") is not None


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Listing:
    """A list of lines: of anything, of commands, or the sentences of the verdict."""

    items: Sequence[str]
    kind: Literal["", "code", "verdict"] = ""


def not_available(reasons: Sequence[str]) -> list[Block]:
    """Return why some of what a section shows is missing; nothing if it is all there."""
    return [Paragraph("Not available here:"), Listing(reasons)] if reasons else []


@dataclass(frozen=True)
class Entry:
    """A table's entry: a text, a smaller one below it, and whether it is the column's best."""

    text: str
    under: str = ""
    best: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """A table: a frame whose cells are texts or entries; the first column names the rows."""

    frame: pd.DataFrame
    caption: str = ""
    words: int = 1  # number of leading columns that hold words; the others hold numbers

    @property
    def head(self) -> list[str]:
        """The columns' names."""
        return [str(name) for name in self.frame.columns]

    @property
    def rows(self) -> list[list[Entry]]:
        """The entries of each row."""
        return [
            [cell if isinstance(cell, Entry) else Entry(str(cell)) for cell in row]
            for row in self.frame.itertuples(index=False, name=None)
        ]


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line's name, its colour and its style, as indices (colors.py)."""

    label: str
    color: int
    style: int = 0


@dataclass(frozen=True)
class Picture:
    """A picture, as SVG in the HTML page and as files beside it."""

    svg: str
    caption: str
    name: str  # of the files in the report's folder, without ending


Spec = Mapping[str, Any]  # the definition of a chart in Vega-Lite, without its data


@dataclass(frozen=True)
class Chart:
    """A chart that the HTML page draws, and pictures of it as files.

    ``shown`` has what the page draws by the label of x, and ``pictures`` what the files have by
    their name, without ending. ``data`` are the rows of all of these: ``columns`` and ``data``.
    """

    caption: str
    shown: Mapping[str, Spec]
    pictures: Mapping[str, Spec]
    data: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        """Write the pictures into a folder, as SVG and PNG, the same each time."""
        import vl_convert

        rows = [dict(zip(self.data["columns"], row, strict=True)) for row in self.data["data"]]
        for name, spec in self.pictures.items():
            svg = _renumbered(vl_convert.vegalite_to_svg({**spec, "data": {"values": rows}}))
            (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
            (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=1.5))


def _renumbered(svg: str) -> str:
    """Count references from 0: Vega counts through all charts that it draws."""
    numbers = defaultdict[str, int](count().__next__)
    return re.sub(r"\b(clip|gradient_)(\d+)\b", lambda m: f"{m[1]}{numbers[m[0]]}", svg)


Block = Heading | Paragraph | Listing | Table | Picture | Chart
