"""How a run tells its rows in its own log: one line of JSON each, behind a mark.

A SuperLink keeps what a ServerApp prints and hands it out as the run's log, also after the end. It
is Flower's only way back from a ServerApp to whoever submitted the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MARK = "fedhet-told "
START, ROW, SUMMARY = "start", "row", "summary"
TOKEN_FILE = "deployment.json"  # in results_dir: by it the ServerApp knows that of its launcher


def told(kind: str, content: Mapping[str, Any]) -> str:
    """Return the line that says something of a run."""
    return f"{MARK}{json.dumps({kind: content})}\n"


def heard(line: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return what a line of a log says, None if it is one of another kind or is cut off."""
    _, mark, text = line.partition(MARK)
    try:
        [(kind, content)] = json.loads(text).items() if mark else []
    except (ValueError, AttributeError):
        return None
    return str(kind), content
