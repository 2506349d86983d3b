"""Colours and styles of lines: for colour-blind readers, on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from fedhet.report.blocks import Key


class Pair(NamedTuple):
    """A colour on a light and on a dark page."""

    light: str
    dark: str


PAGE = Pair("#ffffff", "#14191f")  # all colours below have a contrast to it of 3:1 or more
INK, AXIS, GRID = "#26303b", "#7d8896", "#e4e8ed"  # of charts; the grid is mere decoration
CHROME = (Pair(INK, "#e6ebf1"), Pair(AXIS, AXIS), Pair(GRID, "#333d48"))
# After Okabe and Ito, darker, and without their yellow, which vanishes on white.
PALETTE = (
    Pair("#0072b2", "#4aa8e0"),  # blue
    Pair("#d55e00", "#f0833a"),  # vermilion
    Pair("#00865f", "#2fc79c"),  # green
    Pair("#b4578f", "#de8fbf"),  # purple
    Pair("#a97400", "#f2b738"),  # orange
    Pair("#2b8cc4", "#9ad4f5"),  # sky
    Pair("#6b7280", "#a7b0bc"),  # grey
)
# Dashes in pixels: each line has its own pair of colour and style, up to 28 lines.
STYLES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))
# The most common methods have the same colour on every page.
OWN_COLORS = {"fedavg": 0, "fedpvr": 1, "scaffold": 2, "feddyn": 3, "fedprox": 4, "fedavgm": 5}


def keys_of(lines: Sequence[tuple[str, str]]) -> dict[str, Key]:
    """Return a legend entry for each line, given as (label, method) in the order of the page.

    The first line of a method in OWN_COLORS gets its colour, the others get the next free ones.
    Labels that differ only in case are one line.
    """
    chosen: dict[str, int] = {}
    for label, method in lines:
        own = OWN_COLORS.get(method)
        if own is not None and own not in chosen.values():
            chosen.setdefault(label.casefold(), own)
    free = (number for number in count() if number not in chosen.values())
    taken: dict[str, tuple[int, int]] = {}
    for label, _ in lines:
        name = label.casefold()
        if name in taken:
            continue
        number = chosen[name] if name in chosen else chosen.setdefault(name, next(free))
        color, first = number % len(PALETTE), len(taken)
        styles = ((first + more) % len(STYLES) for more in range(len(STYLES)))
        style = next((s for s in styles if (color, s) not in taken.values()), 0)
        taken[name] = color, style
    return {label: Key(label, *taken[label.casefold()]) for label, _ in lines}
