"""CSV: metrics.csv, a line per round and a column per figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedhet.common.files import save_text
from fedhet.server_app.listeners import Start
from fedhet.server_app.loggers import Row, scalars


class CSV:
    """metrics.csv in the results directory; a figure that a round lacks is an empty cell."""

    def start(self, run: Start) -> None:
        """Write the file afresh, with the rounds that are done."""
        self._path = run.folder / "metrics.csv"
        self._rows = [_cells(row) for row in run.rows]
        names = [name for row in self._rows for name in row]
        self._columns = list(dict.fromkeys(["round", *names]))
        self._rewrite()

    def log(self, row: Row) -> None:
        """Add a line; a new figure adds a column, and the file is rewritten."""
        cells = _cells(row)
        self._rows.append(cells)
        new = [name for name in cells if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
            return
        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(_lines(self._columns, [cells]))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing is left to write."""

    def _rewrite(self) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        save_text(self._path, _lines(self._columns, [header, *self._rows]))


def _cells(row: Row) -> dict[str, Any]:
    return {"round": row["round"], **scalars(row)}


def _lines(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()
