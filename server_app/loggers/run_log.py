"""run_log: rows and summary as lines of the run's log, from which `runtime=deployment` reads them.

The launcher adds it to the loggers of such a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.run_events import ROW, START, SUMMARY, TOKEN_FILE, told
from server_app.loggers import LoggedRun, Row


class RunLog:
    """Lines on stdout, which the SuperLink keeps."""

    def start(self, run: LoggedRun) -> None:
        """Tell the recipe, the rounds that are done, and whether the launcher's folder is here."""
        _say(
            START,
            {
                "folder": str(run.folder),
                "token": _token(run.folder),
                "config": run.config,
                "rows": list(run.rows),
            },
        )

    def log(self, row: Row) -> None:
        """Tell a round's row."""
        _say(ROW, row)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Tell the summary."""
        _say(SUMMARY, summary)


def _say(kind: str, content: Mapping[str, Any]) -> None:
    sys.stdout.write(told(kind, content))  # in one piece: other threads write, too
    sys.stdout.flush()


def _token(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / TOKEN_FILE).read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError):
        return None
