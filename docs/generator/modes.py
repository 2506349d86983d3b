"""The page of modes: which go together, from strategies/compatibility.py."""

from __future__ import annotations

from pathlib import Path

from fedhet.strategies.base import Reads
from fedhet.strategies.compatibility import MODES, PAIRS, Mode, in_words

PAGE = Path(__file__).resolve().parents[1] / "modes.md"
_TEXT = """# Modes

A mode changes a round of any method: who trains, what travels, and what the server can read.
This page comes from
[strategies/compatibility.py](../strategies/compatibility.py). fedhet checks the same
table before round 1.

## What the server can read

Every part of a method (aggregator, server halves, transforms, output) and every observer declares
what it reads of the clients' replies. fedhet rejects a part that reads more than a mode allows, and
names the keys to change.

| mode | key | hides | hooks into | parts may read |
|---|---|---|---|---|
{modes}

## Modes that exclude each other

| mode | mode | why |
|---|---|---|
{pairs}
"""


def page() -> str:
    """Return the page."""
    modes = "\n".join(
        f"| {name} | `{mode.key}` | {mode.hides} | {mode.hooks} | {_left_by(mode)} |"
        for name, mode in MODES.items()
    )
    pairs = "\n".join(f"| {one} | {other} | {why} |" for (one, other), why in PAIRS.items())
    return _TEXT.format(modes=modes, pairs=pairs)


def _left_by(mode: Mode) -> str:
    left = in_words(mode.leaves)
    if mode.to_aggregator != Reads.ALL and mode.to_aggregator != mode.leaves:
        left += f" (the aggregator: {in_words(mode.to_aggregator)})"
    return left
