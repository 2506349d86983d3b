"""The table of clients that a robust aggregator left out, or that stood out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from fedhet.report.blocks import Block, Heading, Table
from fedhet.report.run_data import DISTRUST, Run

COLUMNS = dict(zip(DISTRUST, ("left out", "counted less than half", "stood out"), strict=True))
_MOST = 8  # clients of an entry


def distrusted(runs: Sequence[Run]) -> list[Block]:
    """Return the table, if a run has such clients."""
    shown = [run for run in runs if run.distrusted]
    if not shown:
        return []
    frame = pd.DataFrame(
        {"run": run.name}
        | {title: _entry(run.distrusted.get(column, {})) for column, title in COLUMNS.items()}
        for run in shown
    )
    caption = (
        "Clients, and in how many rounds. Honest clients are among them: a robust aggregator "
        "leaves out who differs, and Krum all but one."
    )
    return [Heading(3, "Distrusted clients"), Table.of(frame, caption, words=4)]


def _entry(counts: Mapping[str, int]) -> str:
    named = [f"{client} ({rounds})" for client, rounds in counts.items()]
    more = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return ", ".join(named[:_MOST]) + more if named else "-"
