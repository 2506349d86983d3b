"""A run's log as it comes from the SuperLink, over as many connections as it takes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from fedhet.runtimes.deployment.control_client import Control
from fedhet.runtimes.deployment.story import Story

_RETRY_SECONDS = 5.0
_SILENT_SECONDS = 120.0  # then the connection may be dead without either end knowing


class LogStream:
    """Reads a run's log again and again from its beginning, until it has been read to the end.

    Args:
        control: of the SuperLink.
        run_id: the run's.
        raw: file for what has been read over this connection.
        log_path: file for the run's own words.
        log_begins: where in that file they begin, in bytes; what is after it comes again.
    """

    def __init__(
        self, control: Control, run_id: int, raw: Path, log_path: Path, log_begins: int
    ) -> None:
        self.story = Story()
        self._control, self._run_id = control, run_id
        self._raw, self._log_path, self._log_begins = raw, log_path, log_begins
        self._process: subprocess.Popen[bytes] | None = None
        self._read, self._rest = 0, ""
        self._heard_at = self._tried_at = 0.0

    def open(self) -> None:
        """Connect, and forget what was read before: all of it comes again."""
        self.close()
        self.story, self._read, self._rest = Story(), 0, ""
        with self._log_path.open("ab") as log:
            log.truncate(min(self._log_begins, log.tell()))  # it may have been removed
        with self._raw.open("wb") as raw:
            self._process = self._control.stream_log(self._run_id, raw)
        self._heard_at = self._tried_at = time.monotonic()

    def close(self) -> None:
        """Disconnect."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def is_open(self) -> bool:
        """Return whether more may come over this connection."""
        if self._process is None or self._process.poll() is not None:
            return False
        return time.monotonic() - self._heard_at < _SILENT_SECONDS

    def wait(self, seconds: float) -> None:
        """Read what still comes of a run that ends, for so long at most."""
        deadline = time.monotonic() + seconds
        while self.is_open() and time.monotonic() < deadline:
            self.read()
            time.sleep(0.1)
        self.read(to_the_end=True)

    def has_come_to_its_end(self) -> bool:
        """Return whether the SuperLink has sent all of a run that is over."""
        return self._process is not None and self._process.poll() == 0

    def may_reopen(self) -> bool:
        """Return whether it is time to try again."""
        return time.monotonic() - self._tried_at > _RETRY_SECONDS

    def postpone(self) -> None:
        """Take note that it was tried, in vain."""
        self._tried_at = time.monotonic()

    def read(self, *, to_the_end: bool = False) -> bool:
        """Take in the whole lines that have come; returns whether there were any.

        Args:
            to_the_end: nothing comes after, so the last line is whole.
        """
        with self._raw.open("rb") as raw:
            raw.seek(self._read)
            new = raw.read()
        # Cut at a line's end, which is no part of a longer UTF-8 character.
        whole = len(new) if to_the_end else new.rfind(b"\n") + 1
        if whole == 0:
            return False
        self._read += whole
        self._heard_at = time.monotonic()
        lines = new[:whole].decode("utf-8", errors="replace").splitlines(keepends=True)
        own = "".join(line for line in lines if not self.story.hear(line))
        with self._log_path.open("a", encoding="utf-8") as log:
            log.write(own)
        return True
