"""config.yaml, metrics.jsonl and summary.json of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fedhet.common.metrics import OWN
from fedhet.common.results import ResultsFolder
from fedhet.server_app.listeners import End, Finished, Listener, Start


class Rows(Listener):
    """Writes the recipe at the start, a row after each round, and the summary at the end.

    It is the first listener: a row is on disk before anything else happens, and a launcher ends
    the processes of a run whose summary says that it is completed.

    Args:
        results: the results directory.
        config: the text of config.yaml.
        own_metrics: names of the user's own metrics, for which no table says what is better.
    """

    def __init__(self, results: ResultsFolder, config: str, own_metrics: Sequence[str]) -> None:
        self._results, self._config, self._own = results, config, list(own_metrics)

    def on_start(self, start: Start) -> None:
        """Write the recipe; a resumed run's clock continues where it stood."""
        self._results.write_config(self._config)
        before = start.rows[-1].get("elapsed_seconds", 0.0) if start.rows else 0.0
        self._began = time.monotonic() - before

    def on_round(self, finished: Finished) -> None:
        """Append the row; resuming drops rows after the checkpoint and measures them again."""
        row = finished.report.row() | {"elapsed_seconds": time.monotonic() - self._began}
        self._results.append(row | ({OWN: self._own} if self._own else {}))

    def on_end(self, end: End) -> None:
        """Write the summary."""
        self._results.write_summary(self._results.summary(end.about, end.status, end.error))
