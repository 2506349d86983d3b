"""What a run tells in its log, and its copy in a results directory that the server does not see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.files import save_text
from common.results import Row, read_rows
from common.run_events import ROW, START, SUMMARY, heard


class Story:
    """What a run has told since its log was read from the beginning.

    Attributes:
        start: folder, token and config, as the ServerApp sees them; empty before its round 0.
        rows: of all rounds, in order.
        summary: empty before the end.
    """

    def __init__(self) -> None:
        self.start: Mapping[str, Any] = {}
        self.rows: list[Row] = []
        self.summary: Mapping[str, Any] = {}

    def hear(self, line: str) -> bool:
        """Take in a line of the log; returns whether it was meant for this object."""
        said = heard(line)
        if said is None:
            return False
        kind, content = said
        if kind == START:
            self.start, self.rows = content, list(content["rows"])
        elif kind == ROW:  # a line that is there twice does no harm
            self.rows = [row for row in self.rows if row["round"] < content["round"]] + [
                dict(content)
            ]
        elif kind == SUMMARY:
            self.summary = content
        return True


def write_rows(path: Path, rows: list[Row]) -> None:
    """Bring a metrics.jsonl to these rows.

    A log is read from its beginning after every break of the connection, so fewer rows than the
    file has are no news. Rows that were measured again replace the old ones.
    """
    before = read_rows(path) if path.exists() else []
    if before[: len(rows)] == rows:
        return
    if rows[: len(before)] == before:
        with path.open("a", encoding="utf-8") as file:
            file.write(_lines(rows[len(before) :]))
    else:
        save_text(path, _lines(rows))


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the recipe, as the ServerApp has resolved it."""
    save_text(path, OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary.json."""
    save_text(path, json.dumps(summary, indent=2) + "\n")


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
