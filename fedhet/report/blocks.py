"""The parts of a page, before they are Markdown or HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Warn:
    """A warning."""

    text: str


@dataclass(frozen=True)
class Verdict:
    """What the page says in a few sentences."""

    sentences: Sequence[str]


@dataclass(frozen=True)
class Listing:
    """A list of lines; ``code`` for commands."""

    items: Sequence[str]
    code: bool = False


@dataclass(frozen=True)
class Entry:
    """A table's entry: a text, a smaller one below it, and whether it is the column's best."""

    text: str
    under: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    caption: str = ""
    words: int = 1  # number of leading columns that hold words; the others hold numbers

    @classmethod
    def of(cls, frame: pd.DataFrame, caption: str = "", words: int = 1) -> Table:
        """Return the table of a frame, whose cells are texts or entries."""
        rows = [
            [cell if isinstance(cell, Entry) else Entry(str(cell)) for cell in row]
            for row in frame.itertuples(index=False)
        ]
        return cls(list(map(str, frame.columns)), rows, caption, words)


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


@dataclass(frozen=True)
class Chart:
    """Curves or a heat map that the HTML page draws with Plotly, and pictures of it as files.

    ``pictures`` has by the files' name, without ending, what draws them to a path of this name.
    """

    caption: str
    data: Mapping[str, Any]  # what templates/page.js draws
    legend: Sequence[Key] = ()
    pictures: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Draw the pictures into a folder."""
        for name, draw in self.pictures.items():
            draw(folder / name)


Block = Heading | Paragraph | Warn | Verdict | Listing | Table | Picture | Chart
