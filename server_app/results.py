"""The results directory of a run: what was measured is on disk when the run dies."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strategies.base import Tensors
from strategies.report import RoundReport
from strategies.storage import save_text

AT_CLIENTS = ("client_accuracy", "client_loss")  # on what they hold out (evaluation.clients)
_SYNC_SECONDS = 1.0  # a sync takes 2 ms: more than a short round


def row_of(report: RoundReport) -> dict[str, Any]:
    """Return a round's line of metrics.jsonl."""
    row: dict[str, Any] = {"round": report.round}
    row |= report.evaluation
    if report.round > 0:
        row |= {_key(name): value for name, value in report.metrics.items()}
        row |= {
            "lr": report.lr,
            "seconds": report.seconds,
            "server_seconds": report.server_seconds,
            "bytes_up": report.bytes_up,
            "bytes_down": report.bytes_down,
            "clients": list(report.clients),
            "failures": list(report.failures),
        }
    if report.absent:
        row["absent"] = list(report.absent)
    row |= {f"client_{_key(name)}": value for name, value in report.client_evaluation.items()}
    return row


def _key(name: str) -> str:
    return name.replace("-", "_")


class RowsFile:
    """A file of JSON lines, one a round, that are on disk as they come.

    Args:
        path: of the file.
        last_round: rows of later rounds are dropped (a resumed run measures them again); None
            starts afresh.
    """

    def __init__(self, path: Path, last_round: int | None = None) -> None:
        self.path = path
        self._synced = 0.0
        self.rows: list[dict[str, Any]] = []
        if last_round is not None and path.exists():
            self.rows = [row for row in read_rows(path) if row["round"] <= last_round]
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def append(self, row: dict[str, Any]) -> None:
        """Add a round's line and flush it to disk.

        Raises:
            OSError: if that cannot be, as on a full disk; the lines before it are there.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()  # to the system: safe when the process dies
                if time.monotonic() - self._synced > _SYNC_SECONDS:  # when the machine does
                    os.fsync(file.fileno())
                    self._synced = time.monotonic()
        except OSError as error:
            raise OSError(f"{self.path} could not be written: {error}") from error
        self.rows.append(row)


class ResultsFolder:
    """config.yaml, metrics.jsonl (a line per round as it ends) and summary.json.

    Args:
        folder: an absolute path; made if need be.
        last_round: rows of later rounds are dropped (a resumed run measures them again); None
            starts afresh.
    """

    def __init__(self, folder: Path, last_round: int | None = None) -> None:
        self.folder = folder
        self._metrics = RowsFile(folder / "metrics.jsonl", last_round)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return self._metrics.rows

    def write_config(self, text: str) -> None:
        """Write the composed recipe."""
        save_text(self.folder / "config.yaml", text)

    def append(self, row: dict[str, Any]) -> None:
        """Add a round's line and flush it to disk."""
        self._metrics.append(row)

    def summary(self, about: Mapping[str, Any], status: str, error: str = "") -> dict[str, Any]:
        """Return what summary.json is to hold, from the rows so far."""
        summary = {**about, **totals(self.rows), "status": status}
        return summary | {"error": error} if error else summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; a launcher ends what is left of a run that calls itself completed."""
        save_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of summary.json that follow from the rows.

    ``seconds`` is the sum over rounds; ``seconds_per_round`` the median without the first round,
    in which workers start; neither holds the evaluation at the server.
    """
    rounds = [row for row in rows if row["round"] > 0]
    evaluated = [row for row in rows if "accuracy" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    at_clients = [row for row in rows if "client_accuracy" in row]
    seconds = [row["seconds"] for row in rounds]
    return {
        "rounds": len(rounds),
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "best_accuracy": max((row["accuracy"] for row in evaluated), default=None),
        "loss": losses[-1] if losses else None,
        **({name: at_clients[-1][name] for name in AT_CLIENTS} if at_clients else {}),
        "seconds": sum(seconds),
        "seconds_per_round": statistics.median(seconds[1:] or seconds) if seconds else None,
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
        "failures": sum(len(row["failures"]) for row in rounds),
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; a last line cut off by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def parameters_sha256(params: Tensors) -> str:
    """Return a hash of names, types, shapes and bits, independent of the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = params[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
