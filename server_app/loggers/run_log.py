"""Logger run_log: prints rows and summary as events, which `runtime=deployment` reads from the log.

The launcher adds it to the loggers of such a run.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from fedhet.common.run_events import RECORD_FILE, ROW, START, SUMMARY, Event, encode, new_key
from fedhet.server_app.listeners import Start
from fedhet.server_app.loggers import Row


class RunLog:
    """Prints events (common/run_events.py) to stdout, which the SuperLink keeps."""

    def __init__(self) -> None:
        self._key = new_key()

    def start(self, run: Start) -> None:
        """Print the recipe, the finished rounds, and the token of the results directory."""
        token: str | None = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((run.folder / RECORD_FILE).read_text(encoding="utf-8"))
            token = str(record["token"])
        self._print(START, {"token": token, "config": run.config, "rows": list(run.rows)})

    def log(self, row: Row) -> None:
        """Print a round's row."""
        self._print(ROW, row)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the summary."""
        self._print(SUMMARY, summary)

    def _print(self, kind: str, content: Mapping[str, Any]) -> None:
        sys.stdout.write(encode(Event(self._key, kind, content)))  # one write: threads write, too
        sys.stdout.flush()
