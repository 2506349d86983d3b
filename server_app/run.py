"""One run of a recipe: task, strategy and results directory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from omegaconf import DictConfig

from fedhet.common.checksums import MODEL, text_sha256
from fedhet.common.errors import ConfigError, DivergedError
from fedhet.common.metrics import SHOWN_METRICS, shown_metrics
from fedhet.common.results import (
    BY_CLIENT,
    COMPLETED,
    DIVERGED,
    FAILED,
    STOPPED,
    ResultsFolder,
    Row,
    is_completed,
)
from fedhet.conf import (
    FOLDER_KEYS,
    LONGER,
    NOTES,
    SITE_KEYS,
    build_part,
    config_yaml,
    fingerprint,
    identity,
    plain_part,
    resolved,
    resume_fingerprint,
    versions,
)
from fedhet.server_app.assembly import (
    backdoor_of,
    build_strategy,
    calibration_of,
    server_model_of,
)
from fedhet.server_app.best_round import (
    BestModel,
    EarlyStopping,
    best_model_rule,
    check_measured,
)
from fedhet.server_app.calibration import CalibrationError, add_coverage
from fedhet.server_app.checkpoint import Checkpoint, CheckpointWriter, load_checkpoint
from fedhet.server_app.class_counts import store_class_counts
from fedhet.server_app.columns import store_columns
from fedhet.server_app.layer_diagnostics import observers_of
from fedhet.server_app.loggers import LoggedRun, Loggers
from fedhet.server_app.machine import evaluation_threads, machine
from fedhet.server_app.reused_training import check_reused_training
from fedhet.server_app.root_set import root_set_of
from fedhet.strategies.base import Tensors
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    personal_names,
    shared_names,
)
from fedhet.strategies.round.client_snapshots import FILE, ClientSnapshots
from fedhet.strategies.round.records import COLUMNS, to_metrics, to_record, to_tensors
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.round.tensor_files import parameters_sha256, save_tensors
from fedhet.tasks import Functions, OwnTask, build_task, keep_freed_memory, pick_device
from fedhet.tasks.evaluation import evaluate_model
from fedhet.tasks.models.own_weights import model_metadata
from fedhet.tasks.models.wrapped import WrappedModel


class Run:
    """One run of a recipe into ``folder``, checked before round 1.

    ``last`` is a checkpoint; ``functions`` are those of a task on own data, in place of those that
    the recipe names; ``columns`` are of a table, as the sites have fitted them together.
    """

    def __init__(
        self,
        recipe: DictConfig,
        folder: Path,
        last: Path | None,
        functions: Functions | None = None,
        columns: str | None = None,
    ) -> None:
        self.loggers = Loggers(build_part(recipe, "logger", classifier_tensors=0))
        keep_freed_memory()
        torch.set_num_threads(1)  # idle threads of a pool would take the simulated clients' CPUs
        self.recipe, self.folder = recipe, folder
        # read once: OmegaConf takes its time, and so does the hash
        self.fingerprint, self.rounds = resume_fingerprint(recipe), int(recipe.rounds)
        self.evaluation = plain_part(recipe, "evaluation")
        self.checkpoint_every, self.target = int(recipe.checkpoint.every), recipe.target_accuracy
        self.began = time.time()
        self.timeout = float(recipe.runtime.round_timeout_seconds)
        # where the clients of a simulation store their states
        self.client_config = ConfigRecord({"state-folder": str(folder / "client_state")})
        if columns is not None:
            self.client_config[COLUMNS] = columns
        self.device = pick_device(recipe.device)
        self.task = build_task(
            plain_part(recipe, "task"),
            plain_part(recipe, "partition"),
            seed=int(recipe.seed),
            num_clients=int(recipe.clients) or 1,
            functions=functions,
            columns=columns,
        )
        if reused := recipe.local.reuse_training:
            check_reused_training(recipe, Path(reused), self.task.classifier_tensors)
        model = self.task.build_model(int(recipe.seed)).to(self.device)
        channels_last = bool(recipe.runtime.channels_last) and not isinstance(model, WrappedModel)
        own = model_metadata(model, self.task.config.lora)
        self.metadata = {**self.task.label_metadata(), **own}
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        personal = TensorSelector(recipe.strategy.personal)
        self.has_personal = bool(personal_names(model, personal))
        self.names = shared_names(model, personal)
        self.server_model = server_model_of(self.task, model)
        test = self.task.test_data(self.device, channels_last=channels_last)
        at_clients = bool(recipe.evaluation.clients)
        if test is None and not at_clients:
            log(INFO, "The server has no test examples: the clients evaluate the model on theirs")
            at_clients = True
        root, self.test_data = root_set_of(recipe, self.task, model, test)
        evaluation = recipe.evaluation
        self.metrics = self.task.metric_set(
            list(evaluation.metrics), per_class=bool(evaluation.per_class), device=self.device
        )
        # the nodes of a deployment have training examples that a server may lack
        self.data = self.task.data_used(train=bool(recipe.runtime.simulation))
        if columns is not None:
            self.data["columns"] = {"sha256": text_sha256(columns)}
            store_columns(folder, columns)
        recorders = observers_of(recipe, folder, self.server_model, self.test_data)
        snapshots = [ClientSnapshots(folder / FILE)] if recipe.checkpoint.client_models else []
        self.strategy = build_strategy(
            recipe,
            self.task,
            self.server_model,
            [*snapshots, *recorders],
            root=root,
            evaluate_on_clients=at_clients,
        )
        self.backdoor = backdoor_of(recipe, self.server_model)
        self.calibration = calibration_of(recipe, model, self.strategy.server_step.output)
        state = model.state_dict()
        initial = {name: state[name] for name in self.names}
        self.arrays = self._restore(last) if last else to_record(initial)
        done = self.strategy.state.round if last else None
        self.results = ResultsFolder(folder, done)
        store_class_counts(recipe, folder, self.task)
        self.stopping = EarlyStopping(**plain_part(recipe, "early_stopping"))
        rule = best_model_rule(recipe, self.stopping)
        at_server = self.test_data is not None or self.evaluation["model"] == "clients"
        check_measured(recipe, rule, self.task.predictions, at_server=at_server)
        self.best_model = BestModel(folder, rule, done) if rule else None
        self.checkpoints = CheckpointWriter(folder / "checkpoints")
        self.stop_reason: str | None = None
        self.last_report: RoundReport | None = None
        rows = self.results.rows  # of the run that is resumed
        self.elapsed_before = rows[-1].get("elapsed_seconds", 0.0) if rows else 0.0
        if last and rows and not is_completed(folder):  # it may lack no more than its end
            self.stop_reason = self._reached(rows[-1])
            self.rounds = rows[-1]["round"] if self.stop_reason else self.rounds
        for recorder in recorders:
            recorder.start(done)
        self.results.write_config(config_yaml(recipe, self.task.classifier_tensors))
        plain = resolved(recipe, self.task.classifier_tensors)
        self.loggers.start(LoggedRun(folder, self._about(), plain, list(rows)))

    def start(self, grid: Grid) -> None:
        """Run the rounds; write the summary however they end.

        Raises:
            DivergedError: if the evaluated loss, or a new model, is no longer finite.
        """
        try:
            result = self.strategy.start(
                grid,
                self.arrays,
                num_rounds=self.rounds,
                timeout=self.timeout,
                train_config=self.client_config,
                evaluate_config=self.client_config,
                evaluate_fn=self._evaluate,
                on_round=self._on_round,
            )
            if self.strategy.state.failed_rounds >= self.rounds:
                if self.last_report is None:
                    raise ConfigError(
                        f"resume=true: all {self.rounds} rounds are done, and none had valid "
                        "replies: set rounds higher, or begin again in another results_dir"
                    )
                raise self.last_report.error(
                    f"no round of {self.recipe.rounds} had min_replies={self.recipe.min_replies} "
                    "valid replies, so the model is the initial one; metrics.jsonl in "
                    f"{self.folder} says why"
                )
            params = to_tensors(result.arrays)
            label = {"kind": MODEL, "run": self.strategy.state.experiment}
            path = self.folder / "model.safetensors"
            save_tensors(path, params, label, self.metadata)
            about = self._about() | {"parameters_sha256": parameters_sha256(params)}
            if self.calibration.alphas:
                about["prediction_sets"] = self._calibrate(grid, result.arrays)
            summary = self.results.summary(about, COMPLETED)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the run has an error already
                self.checkpoints.finish()
            with log_write_errors(self.folder):
                self.loggers.finish(write_error(self.results, self._about(), error))
            raise
        try:
            self.loggers.finish(summary)
        finally:  # last: a launcher ends the processes of a run that is completed
            self.results.write_summary(summary)
        log(INFO, "Results are in %s", self.folder)

    # ---- pieces ------------------------------------------------------------------------------

    def _restore(self, last: Path) -> ArrayRecord:
        checkpoint = load_checkpoint(last, self.names)
        if checkpoint.recipe != self.fingerprint:
            raise ConfigError(
                f"resume=true, but {last} was written by another recipe; you may change only "
                f"{', '.join((*LONGER, *SITE_KEYS, *NOTES, *FOLDER_KEYS))} (its recipe is "
                f"{self.folder / 'config.yaml'})"
            )
        done = checkpoint.state.round
        if done > self.rounds or (done == self.rounds and is_completed(self.folder)):
            raise ConfigError(
                f"rounds={self.recipe.rounds} are done already: {last} is of round "
                f"{checkpoint.state.round}; set rounds higher to continue"
            )
        hashes = self._data_hashes()
        if "columns" in checkpoint.data.keys() - hashes.keys():
            raise ConfigError(
                f"resume=true, but {self.folder} has lost its columns.json, which says how the "
                "sites' columns were fitted: bring it back, or begin anew in another results_dir"
            )
        for split in hashes.keys() & checkpoint.data.keys():
            if hashes[split] != checkpoint.data[split]:
                what = split if split == "columns" else f"{split} examples"
                raise ConfigError(
                    f"resume=true, but the {what} are not those that the run began with: "
                    f"{self.data[split]}; {last} names the hash {checkpoint.data[split]}"
                )
        log(INFO, "Resuming after round %s", checkpoint.state.round)
        self.strategy.restore(checkpoint.state)
        return to_record(checkpoint.params)

    def _data_hashes(self) -> dict[str, str]:
        return {split: str(about["sha256"]) for split, about in self.data.items()}

    def _evaluate(self, round: int, arrays: ArrayRecord) -> MetricRecord | None:
        every = int(self.evaluation["every"])
        self.evaluated = arrays
        if round != self.rounds and (every == 0 or round % every != 0):
            return None
        if round > 0 and self.evaluation["model"] == "clients":
            return self._client_scores()
        if self.test_data is None:
            return None
        model = self._model_of(to_tensors(arrays))
        torch.set_num_threads(evaluation_threads(model, len(self.test_data)))
        loss, accuracy = evaluate_model(model, self.test_data, self.task.loss, metrics=self.metrics)
        torch.set_num_threads(1)
        scores = {} if accuracy is None else {"accuracy": accuracy}  # the task may not classify
        found = self.metrics.compute() if self.metrics else {}
        if self.backdoor is not None:
            batches = self.test_data.batches(500, generator=None, train=False)
            scores["attack_success"] = self.backdoor.success(model, batches)
        return to_metrics({**found, **scores, "loss": loss})

    def _model_of(self, tensors: Tensors) -> torch.nn.Module:
        """Return the output model with these tensors."""
        if tensors.keys() != set(self.names):
            return self.strategy.server_step.build_output_model(tensors)
        self.server_model.load(tensors)
        return self.server_model.model

    def _calibrate(self, grid: Grid, arrays: ArrayRecord) -> dict[str, Any]:
        """Let the clients calibrate prediction sets, and measure these on the test set.

        The rounds are done: if this fails, the run has completed all the same.
        """

        def ask(kind: str, config: ConfigRecord) -> dict[int, RecordDict]:
            config = ConfigRecord({**config, **self.client_config})
            return self.strategy.ask_clients(grid, kind, arrays, config, self.timeout)

        classes = self.task.num_classes
        try:
            held_out = self.strategy.availability.registry.num_held_out
            found = self.calibration.run(ask, classes, held_out)
        except (CalibrationError, TimeoutError) as error:
            log(ERROR, "no prediction sets: %s", error)
            return {"error": str(error)}
        if (
            self.test_data is not None and not self.has_personal
        ):  # else every client has its own model
            model = self._model_of(to_tensors(arrays))
            add_coverage(found, model, self.test_data, classes, int(self.recipe.seed))
        return found

    def _client_scores(self) -> MetricRecord | None:
        """Return the clients' models' mean scores: on the global test set, or else their own."""
        scores = self.strategy.personal_scores()
        kind = "personal-test-" if "personal-test-loss" in scores else "personal-"
        names = ("accuracy", "loss", *self.strategy.client_metrics.names)
        found = {n: scores[kind + n] for n in names if kind + n in scores}
        return to_metrics(found) if found else None

    def _on_round(self, report: RoundReport, arrays: ArrayRecord) -> bool:
        self._finish_checkpoint()
        elapsed = self.elapsed_before + time.time() - self.began
        row = report.row() | {"elapsed_seconds": elapsed}
        self.last_report = report
        self.results.append(row)  # before the checkpoint: resuming drops rows it measures again
        self.loggers.log(row)
        self._check_finite(report)
        every, last = self.checkpoint_every, self.rounds
        self.stop_reason = self._reached(row)
        reached = self.stop_reason is not None
        if self.best_model:
            run = self.strategy.state.experiment
            self.best_model.offer(self.results.rows, to_tensors(self.evaluated), run, self.metadata)
        due = reached or report.round == last or (every > 0 and report.round % every == 0)
        if report.round > 0 and due:
            self._begin_checkpoint(arrays)
            if reached or report.round == last:
                self._finish_checkpoint()
        metrics = list(shown_metrics(row))[:SHOWN_METRICS]
        shown = ["accuracy", "loss", "client_accuracy", "client_loss", "train_loss", *metrics]
        figures = "  ".join(f"{name} {row[name]:.4f}" for name in shown if name in row)
        log(INFO, "[round %s/%s] %s  %.2f s", report.round, last, figures, report.seconds)
        if self.stop_reason:
            log(INFO, "%s", self.stop_reason)
        return reached

    def _reached(self, row: Row) -> str | None:
        """Return why the run ends with its last row, if it does before its last round."""
        target = self.target
        if target is not None and (row.get("accuracy") or -1.0) >= float(target):
            return f"accuracy {row['accuracy']:.6g} reached target_accuracy={target}"
        return self.stopping.stop_reason(self.results.rows)

    def _begin_checkpoint(self, arrays: ArrayRecord) -> None:
        state, recipe = self.strategy.snapshot(), self.fingerprint
        rows, data = self.results.sha256, self._data_hashes()
        checkpoint = Checkpoint(to_tensors(arrays), state, recipe, rows, data)
        self.checkpoints.begin(checkpoint, self.results.sync)

    def _finish_checkpoint(self) -> None:
        """Wait until the last checkpoint, if one was begun, is on the disk."""
        if (committed := self.checkpoints.finish()) is not None:
            self.strategy.state.mark_durable(committed)
            if self.best_model:
                self.best_model.keep()

    def _check_finite(self, report: RoundReport) -> None:
        """Raise a DivergedError if the evaluated model's loss is NaN or Inf."""
        loss = report.evaluation.get("loss", 0.0)
        if not math.isfinite(loss):
            raise DivergedError(
                f"after round {report.round} the loss of the evaluated model is {loss}; "
                f"{self.folder / 'checkpoints'} has the rounds before it (smaller steps may help: "
                "local.lr, local.clip, server.lr)"
            )

    def _about(self) -> dict[str, Any]:
        given = isinstance(self.task, OwnTask) and self.task.by_client  # nothing is divided
        return {
            **identity(self.recipe),
            **({"partition": BY_CLIENT} if given else {}),
            "run": self.strategy.state.experiment,
            "data": self.data,
            "wall_seconds": time.time() - self.began,
            "versions": versions(),
            "machine": machine(self.device),
            "fingerprint": fingerprint(self.recipe),
            **self._best(),
        }

    def _best(self) -> dict[str, Any]:
        """Return what summary.json says of the best round, and of the end before the last one."""
        found: dict[str, Any] = {"stop_reason": self.stop_reason} if self.stop_reason else {}
        if self.stopping.patience is not None:
            found["best_round"] = self.stopping.summary(self.results.rows)
        if self.best_model and (file := self.best_model.summary()):
            found["best_model"] = file
        return found


def write_error(
    results: ResultsFolder, about: Mapping[str, Any], error: BaseException
) -> dict[str, Any]:
    """Write and return the summary of a run that an error or a signal has ended."""
    status, words = FAILED, f"{type(error).__name__}: {error}"
    if isinstance(error, DivergedError):
        status, words = DIVERGED, str(error)
    elif isinstance(error, KeyboardInterrupt | SystemExit):
        rounds = max((row["round"] for row in results.rows), default=0)
        status, words = STOPPED, f"stopped after round {rounds}"
    summary = results.summary(about, status, words)
    results.write_summary(summary)
    return summary


@contextlib.contextmanager
def log_write_errors(folder: Path) -> Iterator[None]:
    """Log that a summary cannot be written, in place of raising over the run's own error."""
    try:
        yield
    except OSError as error:
        log(ERROR, "summary.json in %s could not be written: %s", folder, error)
