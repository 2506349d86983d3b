"""One run of a recipe into a results directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from omegaconf import DictConfig

from fedhet.common.checksums import MODEL
from fedhet.common.errors import ConfigError, DivergedError
from fedhet.common.metrics import own_names
from fedhet.common.results import (
    BY_CLIENT,
    COMPLETED,
    DIVERGED,
    FAILED,
    STOPPED,
    ResultsFolder,
)
from fedhet.conf import (
    build_part,
    config_yaml,
    fingerprint,
    identity,
    plain_part,
    resolved,
    resume_fingerprint,
    versions,
)
from fedhet.server_app.checkpoint import RunOrigin
from fedhet.server_app.class_counts import store_class_counts
from fedhet.server_app.columns import store_columns
from fedhet.server_app.listeners import End, Finished, Listener, Start
from fedhet.server_app.listeners.best_model import BestModel, best_model_rule
from fedhet.server_app.listeners.calibration import CalibratedSets
from fedhet.server_app.listeners.checkpoints import Checkpoints
from fedhet.server_app.listeners.confusion import Confusion
from fedhet.server_app.listeners.messages import Alarm, RoundLine, SmallLastBatches
from fedhet.server_app.listeners.rows import Rows
from fedhet.server_app.listeners.sites import Sites
from fedhet.server_app.listeners.stopping import Divergence, EarlyStopping, Stopping
from fedhet.server_app.loggers import Loggers
from fedhet.server_app.machine import machine
from fedhet.server_app.parts import parts_of, table_lines
from fedhet.server_app.resuming import restore
from fedhet.strategies.components.local_training_config import local_training_config
from fedhet.strategies.modes.robust.aggregator import RobustAggregator
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.wire.records import record_of_copy, to_tensors
from fedhet.strategies.wire.tensor_files import parameters_sha256, save_tensors
from fedhet.tasks import Functions, pick_device
from fedhet.tasks.models.own_weights import counted


class Run:
    """One run of a recipe into ``folder``.

    Args:
        recipe: of the run.
        folder: the results directory.
        last: the checkpoint to resume from; None of a new run.
        functions: those of a task on own data, in place of those that the recipe names.
        columns: of a table, as the sites have fitted them together.
    """

    def __init__(
        self,
        recipe: DictConfig,
        folder: Path,
        last: Path | None,
        functions: Functions | None = None,
        columns: str | None = None,
    ) -> None:
        self.recipe, self.folder, self._columns = recipe, folder, columns
        self._began = time.monotonic()
        self._last_report: RoundReport | None = None
        loggers = build_part(recipe, "logger", classifier_tensors=0)  # a package may be missing
        self.parts = parts_of(recipe, folder, functions, columns, resumed=last is not None)
        self.strategy = self.parts.strategy
        hashes = {split: str(about["sha256"]) for split, about in self.parts.data.items()}
        made_by = {"code": fingerprint(recipe)["code"], **versions()}
        origin = RunOrigin(resume_fingerprint(recipe), hashes, made_by)
        self.arrays, self._done = record_of_copy(self.parts.initial), None
        if last is not None:
            checkpoint = restore(last, recipe, folder, self.parts, origin)
            self.arrays, self._done = record_of_copy(checkpoint.params), checkpoint.state.round
        rule = EarlyStopping(**plain_part(recipe, "early_stopping"))
        best = best_model_rule(recipe, rule)
        self.results = ResultsFolder(folder, self._done)
        stopping = Stopping(recipe.target_accuracy, rule, self.results.rows)
        # a run that is resumed may lack no more than its end
        self.rounds = self.results.rows[-1]["round"] if stopping.reason else int(recipe.rounds)
        self.listeners = self._listeners(Loggers(loggers, self.results), stopping, best, origin)

    def _listeners(
        self, loggers: Loggers, stopping: Stopping, best: EarlyStopping | None, origin: RunOrigin
    ) -> list[Listener]:
        recipe, parts, strategy, results = self.recipe, self.parts, self.strategy, self.results
        config = config_yaml(recipe, parts.task.classifier_tensors)
        rows = Rows(results, config, own_names(recipe.evaluation.metrics))
        listeners = [rows, loggers, *parts.recorders, Divergence(self.folder), stopping]
        checkpoints = Checkpoints(results, strategy, origin, int(recipe.checkpoint.every))
        if best is not None:
            listeners.append(BestModel(best, checkpoints, parts.metadata))
        listeners.append(checkpoints)
        listeners.append(Sites(self.folder, strategy))
        timeout = float(recipe.runtime.round_timeout_seconds)
        if recipe.evaluation.confusion:
            listeners.append(Confusion(parts, timeout))
        if parts.calibration.alphas:
            listeners.append(CalibratedSets(parts, int(recipe.seed), timeout))
        if not recipe.local.reuse_training:
            options = local_training_config(recipe.local, recipe.strategy.phases)
            listeners.append(SmallLastBatches(options, strategy))
        return [*listeners, *([Alarm()] if self._may_be_hostile() else []), RoundLine()]

    def _may_be_hostile(self) -> bool:
        """Return whether a client may be hostile: in a deployment, or if the recipe expects it."""
        aggregator = build_part(self.recipe, "strategy.aggregator", classifier_tensors=1)
        expected = bool(self.recipe.attack) or isinstance(aggregator, RobustAggregator)
        return expected or not self.recipe.runtime.simulation

    def start(self, grid: Grid) -> None:
        """Run the rounds; write the summary however they end.

        Raises:
            DivergedError: if the evaluated loss, or a new model, is no longer finite.
        """
        try:
            self._open()
            arrays = self._run_rounds(grid)
            params = to_tensors(arrays)
            label = {"kind": MODEL, "run": self.strategy.state.experiment}
            path = self.folder / "model.safetensors"
            steps = [row["num_steps"] for row in self.results.rows if "num_steps" in row]
            metadata = counted(self.parts.metadata, steps[-1] if steps else None)
            save_tensors(path, params, label, metadata)
            about = self._about() | {"parameters_sha256": parameters_sha256(params)}
            self._end(End(COMPLETED, about=about, grid=grid, arrays=arrays))
        except BaseException as error:
            with log_write_errors(self.folder):
                self._end(end_by(error, self.results, self._about()))
            raise
        log(INFO, "Results are in %s", self.folder)

    # ---- pieces ------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._columns is not None:
            store_columns(self.folder, self._columns)
        store_class_counts(self.recipe, self.folder, self.parts.task)
        config = resolved(self.recipe, self.parts.task.classifier_tensors)
        start = Start(self.folder, self._about(), config, list(self.results.rows), self._done)
        for listener in self.listeners:
            listener.on_start(start)

    def _run_rounds(self, grid: Grid) -> ArrayRecord:
        """Return the model after the last round."""
        result = self.strategy.start(
            grid,
            self.arrays,
            num_rounds=self.rounds,
            timeout=float(self.recipe.runtime.round_timeout_seconds),
            train_config=self.parts.client_config,
            evaluate_config=self.parts.client_config,
            evaluate_fn=partial(self.parts.evaluation.evaluate, last=self.rounds),
            on_round=self._on_round,
        )
        if 0 < self.rounds <= self.strategy.state.failed_rounds:
            raise self._without_replies()
        return result.arrays

    def _on_round(self, report: RoundReport, arrays: ArrayRecord) -> bool:
        self._last_report, output = report, self.parts.evaluation.output
        run = self.strategy.state.experiment
        finished = Finished(report, self.results.rows, arrays, output, self.rounds, run)
        for listener in self.listeners:
            listener.on_round(finished)
        return finished.stop_reason is not None

    def _end(self, end: End) -> None:
        for listener in reversed(self.listeners):
            listener.on_end(end)

    def _without_replies(self) -> Exception:
        """Return the error of a run in which no round had enough replies."""
        if self._last_report is None:
            return ConfigError(
                f"resume=true: all {self.rounds} rounds are done, and none had valid replies: set "
                "rounds higher, or begin again in another results_dir"
            )
        return self._last_report.error(
            f"no round of {self.recipe.rounds} had min_replies={self.recipe.min_replies} valid "
            f"replies, so the model is the initial one; the last failures: "
            f"{self._last_report.reasons()} (metrics.jsonl in {self.folder} has all)"
        )

    def _about(self) -> dict[str, Any]:
        task = self.parts.task
        names = {str(client): name for client, name in sorted(self.strategy.client_names.items())}
        return {
            **identity(self.recipe),
            "strategy_class": type(self.strategy).__name__,
            # of clients=0, whoever registered
            "clients": int(self.recipe.clients) or self.strategy.num_clients,
            **({"partition": BY_CLIENT} if task.by_client else {}),
            **({"client_names": names} if names else {}),
            **({"table": lines} if (lines := table_lines(task)) else {}),
            "run": self.strategy.state.experiment,
            "data": self.parts.data,
            "wall_seconds": time.monotonic() - self._began,
            "versions": versions(),
            "machine": machine(pick_device(self.recipe.device)),
            "fingerprint": fingerprint(self.recipe),
        }


def end_by(error: BaseException, results: ResultsFolder, about: dict[str, Any]) -> End:
    """Return the status of a run that an error or a signal has ended."""
    if isinstance(error, DivergedError):
        return End(DIVERGED, str(error), about)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        rounds = max((row["round"] for row in results.rows), default=0)
        return End(STOPPED, f"stopped after round {rounds}", about)
    return End(FAILED, f"{type(error).__name__}: {error}", about)


def write_error(results: ResultsFolder, error: BaseException) -> None:
    """Write the summary of a run that an error ends before it begins."""
    end = end_by(error, results, {})
    results.write_summary(results.summary(end.about, end.status, end.error))


@contextlib.contextmanager
def log_write_errors(folder: Path) -> Iterator[None]:
    """Log that a summary cannot be written, in place of raising over the run's own error."""
    try:
        yield
    except OSError as error:
        log(ERROR, "summary.json in %s could not be written: %s", folder, error)
