"""Colours of the pictures: for colour-blind readers, on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from fedhet.report.blocks import Key


class Pair(NamedTuple):
    """A colour on a light and on a dark page."""

    light: str
    dark: str


THEME = {
    "ink": Pair("#26303b", "#dfe5ec"),
    "axis": Pair("#9aa4b1", "#6c7887"),
    "grid": Pair("#e4e8ed", "#2f3842"),
}
# After Okabe and Ito, without their yellow, which vanishes on white.
PALETTE = (
    Pair("#0072b2", "#4aa8e0"),  # blue
    Pair("#d55e00", "#f0833a"),  # vermilion
    Pair("#009e73", "#2fc79c"),  # green
    Pair("#b4578f", "#de8fbf"),  # purple
    Pair("#c98a00", "#f2b738"),  # orange
    Pair("#46a5dc", "#9ad4f5"),  # sky
    Pair("#6b7280", "#a7b0bc"),  # grey
)
# The most common methods have the same colour on every page.
OWN_COLORS = {"fedavg": 0, "fedpvr": 1, "scaffold": 2, "feddyn": 3, "fedprox": 4, "fedavgm": 5}


def keys_of(lines: Sequence[tuple[str, str]]) -> dict[str, Key]:
    """Return a legend entry for each line, given as (label, method) in the order of the page.

    The first line of a method in OWN_COLORS gets its colour, the others get the next free ones.
    When all colours are taken, lines are dashed. Labels that differ only in case are one line.
    """
    chosen: dict[str, int] = {}
    for label, method in lines:
        own = OWN_COLORS.get(method)
        if own is not None and own not in chosen.values():
            chosen.setdefault(label.casefold(), own)
    free = (number for number in count() if number not in chosen.values())
    for label, _ in lines:
        if label.casefold() not in chosen:
            chosen[label.casefold()] = next(free)
    return {label: _key(label, chosen[label.casefold()]) for label, _ in lines}


def _key(label: str, number: int) -> Key:
    return Key(label, number % len(PALETTE), dashed=number // len(PALETTE) % 2 == 1)
