"""Reads a run's log and its events from the SuperLink, reconnecting as often as necessary."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhet.common.results import Row, read_rows, write_rows
from fedhet.common.run_events import ROW, START, SUMMARY, decode
from fedhet.runtimes.deployment.control_client import Control

_RETRY_SECONDS = 5.0
_SILENT_SECONDS = 120.0  # after this long without output the connection may be dead


class RunEvents:
    """The events of a run, in the part of its log that was read."""

    def __init__(self) -> None:
        self.start: Mapping[str, Any] = {}  # token and config, as the ServerApp sees them
        self.rows: list[Row] = []  # of all rounds, in order
        self.summary: Mapping[str, Any] = {}
        self._key = ""  # key of the first event (common/run_events.py)

    def read(self, line: str) -> bool:
        """Process a line of the log; return whether it was an event."""
        event = decode(line, self._key)
        if event is None or (not self._key and event.kind != START):
            return False
        self._key = event.key
        if event.kind == START:
            self.start, self.rows = event.content, list(event.content["rows"])
        elif event.kind == ROW:  # the same line may come twice
            before = [row for row in self.rows if row["round"] < event.content["round"]]
            self.rows = [*before, dict(event.content)]
        elif event.kind == SUMMARY:
            self.summary = event.content
        return True


class LogStream:
    """Reads a run's log, again from its beginning after every break of the connection.

    Args:
        control, run_id: the run to follow.
        raw: file for everything that this connection sends.
        log_path: file for the log without its events.
        log_begins: where the run's log begins in that file, in bytes.
    """

    def __init__(
        self, control: Control, run_id: int, raw: Path, log_path: Path, log_begins: int
    ) -> None:
        self.events = RunEvents()
        self._control, self._run_id = control, run_id
        self._raw, self._log_path, self._log_begins = raw, log_path, log_begins
        self._process: subprocess.Popen[bytes] | None = None
        self._position = 0
        self._last_read = self._last_try = 0.0

    def open(self) -> None:
        """Connect, and forget what was read before: the SuperLink sends the whole log again."""
        self.close()
        self.events, self._position = RunEvents(), 0
        with self._log_path.open("ab") as log:
            log.truncate(min(self._log_begins, log.tell()))  # the file may have been removed
        with self._raw.open("wb") as raw:
            self._process = self._control.stream_log(self._run_id, raw)
        self._last_read = self._last_try = time.monotonic()

    def close(self) -> None:
        """Disconnect."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def is_open(self) -> bool:
        """Return whether this connection may still send more."""
        if self._process is None or self._process.poll() is not None:
            return False
        return time.monotonic() - self._last_read < _SILENT_SECONDS

    def is_complete(self) -> bool:
        """Return whether the run is over and the SuperLink has sent its whole log."""
        return self._process is not None and self._process.poll() == 0

    def may_reopen(self) -> bool:
        """Return whether it is time to connect again."""
        return time.monotonic() - self._last_try > _RETRY_SECONDS

    def postpone(self) -> None:
        """Restart the wait before the next attempt to connect."""
        self._last_try = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Read the rest of a log that is ending, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.is_open() and time.monotonic() < deadline:
            self.read()
            time.sleep(0.1)
        self.read(to_the_end=True)

    def read(self, *, to_the_end: bool = False) -> bool:
        """Process the complete new lines (``to_the_end``: all); return whether there were any."""
        with self._raw.open("rb") as raw:
            raw.seek(self._position)
            new = raw.read()
        complete = len(new) if to_the_end else new.rfind(b"\n") + 1
        if complete == 0:
            return False
        self._position += complete
        self._last_read = time.monotonic()
        lines = new[:complete].decode("utf-8", errors="replace").splitlines(keepends=True)
        with self._log_path.open("a", encoding="utf-8") as log:
            log.writelines(line for line in lines if not self.events.read(line))
        return True


def update_rows(path: Path, rows: list[Row]) -> None:
    """Update a metrics.jsonl with these rows.

    When a log is read again from its beginning, it first has fewer rows than the file; these change
    nothing. Rows that were measured again replace the old ones.
    """
    before = read_rows(path) if path.exists() else []
    if before[: len(rows)] != rows:
        write_rows(path, rows)
