"""MLflow: a run there for a run here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from fedhet.common.files import save_text
from fedhet.common.nested import leaves
from fedhet.common.results import COMPLETED, STOPPED
from fedhet.server_app.listeners import Start
from fedhet.server_app.loggers import Row, require_package, scalars

_PARAMS_AT_ONCE = 100  # MLflow's limit for a request
_LONGEST = 250  # characters of a name
_IN_EVERY_ROW = "elapsed_seconds"


class MLflow:
    """Metrics over rounds (MLflow's steps), the recipe's leaves as params, and the summary.

    Args:
        tracking_uri: the store; None: MLFLOW_TRACKING_URI, or else mlflow/mlflow.db in the
            results directory. Passwords go into MLFLOW_TRACKING_PASSWORD: the recipe is stored.
        experiment: the experiment's name there.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "fedhet") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._tracking = require_package("mlflow.tracking", "mlflow")
        self._entities = require_package("mlflow.entities", "mlflow")
        require_package("sqlalchemy", "mlflow")
        self._uri, self._experiment = tracking_uri, experiment

    def start(self, run: Start) -> None:
        """Open a run, or continue the folder's earlier one, and add the rounds it lacks."""
        folder = run.folder / "mlflow"
        folder.mkdir(exist_ok=True)
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = self._tracking.MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        kept = folder / "run_id"
        if run.done is not None and kept.exists():
            self._run_id = kept.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._create(run)
            save_text(kept, self._run_id)
        logged = self._client.get_metric_history(self._run_id, _IN_EVERY_ROW)
        self._last = max((metric.step for metric in logged), default=-1)
        for row in run.rows:
            self.log(row)

    def log(self, row: Row) -> None:
        """Log a round, unless MLflow has it: it would store both."""
        if row["round"] > self._last:
            self._log_metrics(scalars(row), row["round"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Add the summary's figures as ``summary/<name>`` and end the run."""
        figures = {f"summary/{name}": value for name, value in scalars(summary).items()}
        self._log_metrics(figures, step=int(summary["rounds"]))
        ends = {COMPLETED: "FINISHED", STOPPED: "KILLED"}
        self._client.set_terminated(self._run_id, ends.get(summary["status"], "FAILED"))

    def _create(self, run: Start) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        tags = {name: str(run.about[name]) for name in ("strategy", "task")}
        tags["results_dir"] = str(run.folder)
        made = self._client.create_run(experiment, run_name=run.folder.name, tags=tags)
        # the paper's tables change nothing in the run
        settings = {name: value for name, value in run.config.items() if name != "paper"}
        params = [
            self._entities.Param(_allowed(name), str(value)) for name, value in leaves(settings)
        ]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            part = params[first : first + _PARAMS_AT_ONCE]
            self._client.log_batch(made.info.run_id, params=part)
        return str(made.info.run_id)

    def _log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(_allowed(name), value, now, step)
            for name, value in figures.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)


def _allowed(name: str) -> str:
    """Return a name with _ for characters that MLflow forbids, such as a quote in a class's
    name."""
    return re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)[:_LONGEST]
