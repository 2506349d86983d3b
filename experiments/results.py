"""What a run has written so far in its results directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class Results:
    """What has come in a results directory since this object was made.

    What was there before belongs to the run that is resumed, and is not reported.
    """

    def __init__(self, folder: Path) -> None:
        """Remember what ``folder`` holds now."""
        self.metrics_path = folder / "metrics.jsonl"
        self._summary_path = folder / "summary.json"
        self._summary_before = _stamp(self._summary_path)
        self._metrics_seen: tuple[int, int] | None = None
        self._last_round = -1
        self.new_rows()

    def new_rows(self) -> list[Row]:
        """Return the rows of rounds that were not there at the last call."""
        stamp = _stamp(self.metrics_path)
        if stamp is None or stamp == self._metrics_seen:
            return []
        self._metrics_seen = stamp
        rows = read_rows(self.metrics_path)
        # A resumed run first drops the rounds after its checkpoint, then measures them again.
        newest = max((int(row["round"]) for row in rows), default=-1)
        since, self._last_round = min(self._last_round, newest), newest
        return [row for row in rows if int(row["round"]) > since]

    def summary(self) -> Mapping[str, Any]:
        """Return summary.json, empty as long as there is no new one."""
        if _stamp(self._summary_path) in (None, self._summary_before):
            return {}
        try:
            summary = json.loads(self._summary_path.read_text(encoding="utf-8"))
        except ValueError:  # half written
            return {}
        return summary if isinstance(summary, dict) else {}


def read_rows(path: Path) -> list[Row]:
    """Return the whole rows of a metrics.jsonl; a line that is still being written is left out."""
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line]


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a log that are not blank."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "(it said nothing)"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
