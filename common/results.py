"""The results directory of a run: config.yaml, metrics.jsonl and summary.json.

This is the one place that writes and reads them. metrics.jsonl has one JSON object per line and
round, round 0 being the initial model; each line is written before the next round begins.
summary.json is written last, however the run ended. Both files are valid JSON: NaN and Inf become
null.

A row of metrics.jsonl:
    round                    t, from 0
    accuracy, loss           of the evaluated model, in rounds that evaluate
    lr                       eta_l of the round
    seconds, server_seconds  of the whole round, and of the server's step in it
    elapsed_seconds          since the start of the run, earlier processes included
    bytes_up, bytes_down     payload bytes of the round
    clients                  ids of the clients whose replies were valid
    client_names             their names, if they have some; a summary has them by id
    failures                 one sentence for each reply that was lost or rejected, in training or
                             in the evaluation at the clients
    left_out, down_weighted  under a robust aggregator: ids of clients that did not count; by client
                             the share of its part in the plain mean, if below a half
    alarms, standing_out     how many clients stand out, and how far, by client id (docs/robust.md)
    absent                   ids of the clients that were not connected
    dropped, late            with a simulated system (recipe group system): asked in vain
    simulated_seconds        on the system's clock, since the start of the run
    client_*                 evaluation at the clients
    f1, client_f1, f1/cat    metrics that evaluation.metrics names (common/metrics.py)
    own_metrics              the names of metrics that are the user's own functions
    per_client               with evaluation.per_client: each client's value of these means, by id
    and what the clients and the method measured, by name.

summary.json has the run's identity (strategy, task, seed, versions, machine, fingerprint), the
figures of :func:`totals`, ``parameters_sha256``, ``status``, ``error`` if it did not complete, and
``format``. ``metrics_sha256`` and ``config_sha256`` are the hashes of the files beside it, and
``sha256`` is its own: a file that does not fit is rejected. The status is one of

    completed   all rounds are done, and the model is stored
    diverged    the evaluated loss, or the new model, held NaN or Inf
    stopped     by Ctrl-C or SIGTERM: resume=true continues it
    failed      by an error
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedhet.common.checksums import text_sha256
from fedhet.common.errors import DamagedFileError
from fedhet.common.files import save_text
from fedhet.common.metrics import OWN, is_of_own_models, metric_totals, own_metrics

Row = dict[str, Any]

FORMAT = 2  # of results directories
COMPLETED, DIVERGED, STOPPED, FAILED = "completed", "diverged", "stopped", "failed"
ROUNDS_WITHOUT_ROWS = "rounds_without_rows"  # in summary.json: rows that metrics.jsonl has lost
BY_CLIENT = "by client"  # a summary's partition if the user's own function gives each its data
CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
LOG = "log.txt"  # Flower's, as the launcher receives it
_OF_EVERY_SIMULATION = "Since flwr 1.32, default simulated SuperNodes"  # Flower warns of it always
CLASS_COUNTS = "class_counts.json"  # in a simulation: who holds which classes
SITES = "sites.json"  # who the clients are: names, numbers of examples, who never trains
BY_SITE = "by_site.json"  # what fedhet-evaluate --by-site has measured at each site
AT_CLIENTS = ("client_accuracy", "client_loss")  # on what they hold out (evaluation.clients)
_FAILURE = re.compile(r"client (\d+): (.*)", re.DOTALL)  # in a row
_SHOWN_CLIENTS = 10
_SYNC_SECONDS = 10.0  # a sync takes 2 to 16 ms; a checkpoint makes one, too


class RowsFile:
    """Writes a file of JSON lines, one per round.

    Rows after ``last_round`` are dropped, because a resumed run measures them again; None starts
    afresh.
    """

    def __init__(self, path: Path, last_round: int | None = None) -> None:
        self.path = path
        self._synced = 0.0
        self.rows: list[Row] = []
        if last_round is not None and path.exists():
            self.rows = [row for row in read_rows(path) if row["round"] <= last_round]
        self._digest = _digest_of(self.rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, self.rows)

    @property
    def sha256(self) -> str:
        """The hash of the rows, :func:`rows_sha256`."""
        return str(self._digest.hexdigest())

    def append(self, row: dict[str, Any]) -> None:
        """Add a round's line and flush it to disk; if that fails, the lines before it stay."""
        row = finite(row)
        line = _line(row)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()  # to the system: safe when the process dies
                if time.monotonic() - self._synced > _SYNC_SECONDS:  # when the machine does
                    os.fsync(file.fileno())
                    self._synced = time.monotonic()
        except OSError as error:
            raise OSError(f"{self.path} could not be written: {error}") from error
        self._digest.update(line.encode())
        self.rows.append(row)

    def sync(self) -> None:
        """Sync all rows to the disk: a checkpoint with their hash must not outlive them."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self._synced = time.monotonic()


class ResultsFolder:
    """Writes a run's results directory; ``last_round`` is as in :class:`RowsFile`."""

    def __init__(self, folder: Path, last_round: int | None = None) -> None:
        self.folder = folder
        self._metrics = RowsFile(folder / METRICS, last_round)
        self._lost = (last_round or 0) - sum(row["round"] > 0 for row in self.rows)
        self._config_sha256: str | None = None

    @property
    def rows(self) -> list[Row]:
        """The lines of metrics.jsonl."""
        return self._metrics.rows

    def write_config(self, text: str) -> None:
        """Write the composed recipe."""
        save_text(self.folder / CONFIG, text)
        self._config_sha256 = text_sha256(text)

    def append(self, row: dict[str, Any]) -> None:
        """Add a round's line and flush it to disk."""
        self._metrics.append(row)

    @property
    def sha256(self) -> str:
        """The hash of metrics.jsonl."""
        return self._metrics.sha256

    def sync(self) -> None:
        """Sync metrics.jsonl to the disk."""
        self._metrics.sync()

    def summary(self, about: Mapping[str, Any], status: str, error: str = "") -> dict[str, Any]:
        """Return the content of summary.json for the rows so far."""
        summary = {"format": FORMAT, **about, **totals(self.rows), "status": status}
        summary |= {ROUNDS_WITHOUT_ROWS: self._lost} if self._lost > 0 else {}
        summary["metrics_sha256"] = self._metrics.sha256
        summary |= {"config_sha256": self._config_sha256} if self._config_sha256 else {}
        return dict(finite(summary | {"error": error} if error else summary))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; once it says completed, a launcher ends the run's processes."""
        write_summary(self.folder, summary)


def warnings_of(folder: Path) -> list[str]:
    """Return the texts of the warnings in a run's log; Flower's logger colours the first word."""
    with suppress(OSError), (folder / LOG).open(encoding="utf-8", errors="replace") as log:
        found = [line for line in log if line.removeprefix("\x1b[93m").startswith("WARNING")]
        texts = [line.partition(":")[2].strip() for line in found]
        return [text for text in texts if not text.startswith(_OF_EVERY_SIMULATION)]
    return []


class ResultsFollower:
    """Reads a results directory while its run writes it.

    It ignores earlier content, which belongs to the run that is resumed.
    """

    def __init__(self, folder: Path) -> None:
        """Remember what ``folder`` holds now."""
        self.folder = folder
        self.metrics_path = folder / METRICS
        self._summary_before = _stamp(folder / SUMMARY)
        self._file = 0  # the inode: a resumed run replaces the file, less the rounds it does again
        self._read = 0  # bytes
        self._last_round = -1
        self._warnings = len(warnings_of(folder))
        self._told: set[str] = set()  # warnings
        self.new_rows()

    def new_rows(self) -> list[Row]:
        """Return the rows that were not there at the last call."""
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
        rows = _rows_of(complete, self.metrics_path)
        self._read += len(complete) + 1 if complete else 0
        before = -1 if replaced else self._last_round
        newest = max((int(row["round"]) for row in rows), default=before)
        since = min(self._last_round, newest) if replaced else -1
        self._last_round = newest
        return [row for row in rows if int(row["round"]) > since]

    def new_warnings(self) -> list[str]:
        """Return the log's warnings that no call has returned yet, less those in a row."""
        found = dict.fromkeys(warnings_of(self.folder)[self._warnings :])
        new = [text for text in found if text not in self._told and not text.startswith("round ")]
        self._told |= {*new}
        return new

    def summary(self) -> Mapping[str, Any]:
        """Return summary.json, or an empty mapping until there is a new one."""
        if _stamp(self.folder / SUMMARY) in (None, self._summary_before):
            return {}
        try:
            return read_summary(self.folder)
        except ValueError:  # an unreadable summary does not end a run
            return {}


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; a last line without its end is left out.

    Raises:
        OSError: if it is missing or cannot be read.
        DamagedFileError: if a line is not a JSON object with its round.
    """
    return _rows_of(path.read_bytes().rpartition(b"\n")[0], path)


def _rows_of(lines: bytes, path: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in lines.decode().splitlines() if line]
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from None
    for number, row in enumerate(rows, 1):
        if not (isinstance(row, dict) and isinstance(row.get("round"), int)):
            raise DamagedFileError(f"{path} is damaged: line {number} is not a row with its round")
    return rows


def said_once(failures: Iterable[str]) -> list[str]:
    """Return a round's failures with each reason once, beside the clients that have it."""
    clients: dict[str, list[str]] = {}
    for failure in failures:
        found = _FAILURE.fullmatch(failure)
        name, reason = found.groups() if found else ("", failure)
        clients.setdefault(reason, []).append(name)
    return [f"{_named(names)}{reason}" for reason, names in clients.items()]


def _named(clients: Sequence[str]) -> str:
    if not clients[0]:  # a failure without a client
        return ""
    if len(clients) == 1:
        return f"client {clients[0]}: "
    more = ", ..." if len(clients) > _SHOWN_CLIENTS else ""
    return f"{len(clients)} clients ({', '.join(clients[:_SHOWN_CLIENTS])}{more}): "


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a file of JSON lines, whole or not at all."""
    save_text(path, "".join(map(_line, rows)))


def rows_sha256(rows: Iterable[Row]) -> str:
    """Return the hash of rows as metrics.jsonl has them."""
    return str(_digest_of(rows).hexdigest())


def fits_rows(summary: Mapping[str, Any], rows: Iterable[Row]) -> bool:
    """Return whether a summary.json belongs to these rows, or does not say which rows."""
    return summary.get("metrics_sha256") in (None, rows_sha256(rows))


def check_rows(path: Path, rows: list[Row], summary: Mapping[str, Any]) -> None:
    """Raise a DamagedFileError if metrics.jsonl is not the one that summary.json names."""
    if not fits_rows(summary, rows):
        raise DamagedFileError(f"{path} is damaged or of another run: {SUMMARY} has another hash")


def read_config(folder: Path, summary: Mapping[str, Any]) -> str:
    """Return the text of config.yaml; ``summary`` is the folder's, empty without one.

    Raises:
        OSError: if it is missing or cannot be read.
        DamagedFileError: if it is not the one that the summary names.
    """
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from None
    if summary.get("config_sha256") not in (None, text_sha256(text)):
        raise DamagedFileError(
            f"{path} is damaged or of another run: {SUMMARY} has another hash. If the run was "
            "resumed and has not ended, resume it again"
        )
    return text


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary.json of a results directory.

    Raises:
        OSError: if it is missing or cannot be read.
        DamagedFileError: if it differs from what was written.
    """
    path = folder / SUMMARY
    try:
        text = path.read_text(encoding="utf-8")
        summary = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(summary, dict) or "status" not in summary:
        raise DamagedFileError(f"{path} is not the summary of a run: it has no status")
    checksum = summary.pop("sha256", None)
    new = any(key in summary for key in ("metrics_sha256", "config_sha256"))
    if (checksum is not None or new) and checksum != _sha256_of(summary):
        raise DamagedFileError(f"{path} is damaged: its content does not match its checksum")
    return summary


def summary_of(folder: Path) -> dict[str, Any]:
    """Return a run's summary.json, empty while it has none."""
    return read_summary(folder) if (folder / SUMMARY).exists() else {}


def read_summary_or_empty(folder: Path) -> dict[str, Any]:
    """Return a run's summary.json, empty if it cannot be read."""
    try:
        return read_summary(folder)
    except (OSError, ValueError):
        return {}


def read_counts(folder: Path) -> dict[str, Any]:
    """Return class names, counts and the number of clients, or the error that prevents them."""
    try:
        content = json.loads((folder / CLASS_COUNTS).read_text(encoding="utf-8"))
        names = [str(name) for name in content["class_names"]]
        counts = [[int(number) for number in row] for row in content["counts"]]
        if not counts or any(len(row) != len(names) for row in counts):
            raise ValueError(f"not {len(names)} counts in every row")
        return {"class_names": names, "counts": counts, "clients": int(content["clients"])}
    except FileNotFoundError:
        reason = "its nodes have their own data (fedhet-partition draws a recipe's partition)"
        return {"error": f"its run has no {CLASS_COUNTS}: {reason}"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"error": f"its {CLASS_COUNTS} cannot be read: {error}"}


def is_completed(folder: Path) -> bool:
    """Return whether a results directory holds the summary of a completed run."""
    try:
        return bool(read_summary(folder)["status"] == COMPLETED)
    except (OSError, DamagedFileError):
        return False


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary.json of a results directory with its checksum, whole or not at all."""
    content = {key: value for key, value in summary.items() if key != "sha256"}
    content["sha256"] = _sha256_of(content)
    save_text(folder / SUMMARY, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_end(folder: Path, about: Mapping[str, Any], status: str, error: str) -> None:
    """Write the summary of a run that could not write its own, from the rows in its folder.

    A summary that fits these rows stays: no round has ended since it was written.
    """
    metrics = folder / METRICS
    rows = read_rows(metrics) if metrics.exists() else []
    with suppress(OSError, DamagedFileError):
        if fits_rows(read_summary(folder), rows):
            return
    summary = {"format": FORMAT, **about, **totals(rows), "status": status}
    summary["metrics_sha256"] = rows_sha256(rows)
    with suppress(FileNotFoundError):
        config = (folder / CONFIG).read_text(encoding="utf-8")
        summary["config_sha256"] = text_sha256(config)
    write_summary(folder, finite(summary | {"error": error}))


def finite(value: Any) -> Any:
    """Return a value for JSON, with None for NaN and Inf."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def totals(rows: list[Row]) -> dict[str, Any]:
    """Return the figures of summary.json that follow from the rows.

    ``seconds`` is the sum over rounds. ``seconds_per_round`` is the median without the first round,
    in which workers start. Neither includes the evaluation at the server.
    """
    rounds = [row for row in rows if row["round"] > 0]
    evaluated = [row for row in rows if row.get("accuracy") is not None]
    losses = [row["loss"] for row in rows if "loss" in row]
    scores = ("accuracy", *AT_CLIENTS)
    scored = [row for row in rows if any(row.get(name) is not None for name in scores)]
    at_clients = {
        name: row[name] for row in scored[-1:] for name in AT_CLIENTS if row.get(name) is not None
    }
    seconds = [row["seconds"] for row in rounds]
    own = own_metrics(rows)
    personal = {
        name: value
        for row in rows
        for name, value in row.items()
        if value is not None and is_of_own_models(name, own)
    }
    return {
        "rounds": len(rounds),
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "best_accuracy": max((row["accuracy"] for row in evaluated), default=None),
        "loss": losses[-1] if losses else None,
        **at_clients,
        **personal,
        **metric_totals(rows),
        **({OWN: own} if own else {}),
        "seconds": sum(seconds),
        "seconds_per_round": statistics.median(seconds[1:] or seconds) if seconds else None,
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
        "failures": sum(len(row["failures"]) for row in rounds),
    }


def _sha256_of(summary: Mapping[str, Any]) -> str:
    text = json.dumps(summary, allow_nan=False)
    return text_sha256(json.dumps(json.loads(text), sort_keys=True))


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _digest_of(rows: Iterable[Row]) -> Any:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_line(row).encode())
    return digest


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
