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
        self._file = 0  # the inode: a resumed run replaces the file, less the rounds it does again
        self._read = 0  # bytes
        self._last_round = -1
        self.new_rows()

    def new_rows(self) -> list[Row]:
        """Return the rows of rounds that were not there at the last call."""
        try:
            status = self.metrics_path.stat()
        except FileNotFoundError:
            return []
        if status.st_ino != self._file or status.st_size < self._read:
            self._file, self._read = status.st_ino, 0
        if status.st_size == self._read:
            return []
        replaced = self._read == 0
        with self.metrics_path.open("rb") as file:
            file.seek(self._read)
            complete = file.read().rpartition(b"\n")[0]
        rows = [json.loads(line) for line in complete.splitlines() if line]
        self._read += len(complete) + 1 if complete else 0
        newest = max(
            (int(row["round"]) for row in rows), default=-1 if replaced else self._last_round
        )
        since = min(self._last_round, newest) if replaced else -1
        self._last_round = newest
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
