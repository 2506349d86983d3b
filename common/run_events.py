"""Run events: a ServerApp's recipe, rows and summary as lines of its log, for runtime=deployment.

Flower cannot send a file from a ServerApp to whoever submitted the run. The SuperLink only
keeps what the ServerApp prints and serves it as the run's log, also after the end. An event is one
line of that log: a mark, the run's key, JSON.

Text from a site may reach the log (the reason of an error), but only the ServerApp can write
events: it removes the mark from such text, and draws a random key. The reader takes the key of the
first event and ignores events with another key. A site cannot read the log, so it cannot learn the
key. A key in the run config would protect nothing, because Flower gives it to every ClientApp.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedhet.common.results import finite

START, ROW, SUMMARY = "start", "row", "summary"
RECORD_FILE = "deployment.json"  # in results_dir; its token tells the ServerApp whose folder it is
EVENT_MARK = "fedhet-event"


class Event(NamedTuple):
    """One event of a run: its key, its kind (start, row, summary) and its content."""

    key: str
    kind: str
    content: Mapping[str, Any]


def new_key() -> str:
    """Return a random key for the events of one ServerApp."""
    return secrets.token_hex(16)


def encode(event: Event) -> str:
    """Return an event as a line of the log; NaN and Inf are null, as in the results directory."""
    text = json.dumps({event.kind: finite(event.content)}, allow_nan=False)
    return f"{EVENT_MARK} {event.key} {text}\n"


def decode(line: str, key: str = "") -> Event | None:
    """Return the event in a line, after any other output; None if there is no event.

    ``key`` is the key of the run's events, or "" before the first.
    """
    found = re.search(rf"{EVENT_MARK} ({key or '[0-9a-f]{32}'}) (.*)", line)
    try:
        [(kind, content)] = json.loads(found[2]).items() if found else []
    except (ValueError, AttributeError):  # an incomplete line
        return None
    return Event(found[1], str(kind), content) if found else None
