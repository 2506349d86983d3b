"""The parts of a page, before they are Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
class Listing:
    """A list of lines; ``code`` for commands."""

    items: Sequence[str]
    code: bool = False


@dataclass(frozen=True)
class Entry:
    """A table's entry: a text, and a smaller one below it."""

    text: str
    under: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    caption: str = ""
    words: int = 1  # number of leading columns that hold words; the others hold numbers


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line's name, the index of its colour, and whether it is dashed."""

    label: str
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Picture:
    """A picture, as SVG in the HTML page and as files beside it."""

    svg: str
    caption: str
    name: str  # of the files in the report's folder, without ending
    themed: bool = True  # its colours follow the page's theme


Block = Heading | Paragraph | Warn | Listing | Table | Picture
