"""Loggers write each round's metrics to CSV, TensorBoard, W&B or MLflow, beside metrics.jsonl.

The recipe's ``logger`` names them (``logger=csv``, ``logger=[csv,tensorboard]``); each is a file
here and one in conf/logger/. A resumed run hands the rows of metrics.jsonl to
:meth:`Logger.start`, so that a logger has every round once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from logging import WARNING
from types import ModuleType
from typing import Any, Protocol

from flwr.common.logger import log

from fedhet.common.errors import ConfigError
from fedhet.common.metrics import OWN
from fedhet.common.results import ResultsFolder
from fedhet.server_app.listeners import End, Finished, Listener, Start

Row = Mapping[str, Any]


class Logger(Protocol):
    """One output of a run."""

    def start(self, run: Start) -> None:
        """Open the output and make it end with the last of ``run.rows``."""

    def log(self, row: Row) -> None:
        """Write a round's row; it must survive if the run is killed next."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the output; ``summary`` is the content of summary.json, also of a failed run."""


class Loggers(Listener):
    """The loggers of a run: if one cannot start, the run ends; if one fails later, it is dropped.

    Args:
        loggers: by name.
        results: of the run, which makes the summary.
    """

    def __init__(self, loggers: Mapping[str, Logger], results: ResultsFolder) -> None:
        self._all, self._results = dict(loggers), results
        self._active: dict[str, Logger] = {}

    def on_start(self, start: Start) -> None:
        """Start every logger; raise a ConfigError that names one that cannot."""
        for name, logger in self._all.items():
            try:
                logger.start(start)
            except Exception as error:
                raise ConfigError(
                    f"logger.{name} cannot start ({type(error).__name__}: {error}); fix it, or "
                    f"leave {name} out of logger=[{','.join(self._all)}]"
                ) from error
            self._active[name] = logger

    def on_round(self, finished: Finished) -> None:
        """Hand the round's row to every logger that still works."""
        row = finished.rows[-1]
        self._call(f"in round {row['round']}", lambda logger: logger.log(row))

    def on_end(self, end: End) -> None:
        """Close every logger that still works."""
        summary = self._results.summary(end.about, end.status, end.error)
        self._call("at the end", lambda logger: logger.finish(summary))
        self._active = {}

    def _call(self, when: str, call: Callable[[Logger], None]) -> None:
        text = "logger.%s failed %s and receives no further rows; metrics.jsonl has them all (%s)"
        for name, logger in list(self._active.items()):
            try:
                call(logger)
            except Exception as error:
                del self._active[name]
                log(WARNING, text, name, when, f"{type(error).__name__}: {error}")


def scalars(row: Row) -> dict[str, float]:
    """Return a row's numbers without the round, and the length of each list as ``num_<name>``.

    The names of the user's own metrics are no figure.
    """
    figures: dict[str, float] = {}
    for name, value in row.items():
        if name == OWN:
            continue
        if isinstance(value, list):
            figures[f"num_{name}"] = len(value)
        elif isinstance(value, int | float) and name != "round":
            figures[name] = value
    return figures


def require_package(module: str, extra: str) -> ModuleType:
    """Import the package behind a logger; a ConfigError names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"logger={extra} needs the package {error.name}, which is not installed: "
            f'pip install -c constraints.txt -e ".[{extra}]" in the clone, or leave {extra} out of '
            "logger=[...]"
        ) from error
