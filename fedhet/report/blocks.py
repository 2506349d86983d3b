"""What a page is made of, before it is Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Warn:
    """Something a reader must not miss."""

    text: str


@dataclass(frozen=True)
class Listing:
    """A list of lines; ``code`` for commands."""

    items: Sequence[str]
    code: bool = False


@dataclass(frozen=True)
class Entry:
    """A table's entry: a text, and a smaller one under it."""

    text: str
    under: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first column names the rows.

    Args:
        head: the columns' names.
        rows: as long as the head.
        caption: what is seen.
        words: how many of the first columns hold words; the others hold numbers.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    caption: str = ""
    words: int = 1


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line's name, the number of its colour, and whether it is dashed."""

    label: str
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Drawing:
    """A panel as SVG, for the HTML page; ``themed``: its colours follow the page's."""

    svg: str
    label: str
    themed: bool = True


@dataclass(frozen=True)
class Gallery:
    """Panels side by side.

    Args:
        drawings: the panels.
        legend: what the colours mean.
        caption: what is seen.
        files: the names of the whole pictures in the report's folder, without ending.
        small: the panels are small multiples.
    """

    drawings: Sequence[Drawing]
    legend: Sequence[Key]
    caption: str
    files: Sequence[str]
    small: bool = False


Block = Heading | Paragraph | Warn | Listing | Table | Gallery
