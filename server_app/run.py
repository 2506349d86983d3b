"""One run of a recipe: task, strategy and results directory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from fedhet.common.checksums import MODEL, read_label, text_sha256
from fedhet.common.errors import ConfigError, DivergedError
from fedhet.common.metrics import OWN, SHOWN_METRICS, own_names, shown_metrics
from fedhet.common.nested import leaves
from fedhet.common.results import (
    BY_CLIENT,
    COMPLETED,
    CONFIG,
    DIVERGED,
    FAILED,
    METRICS,
    STOPPED,
    ResultsFolder,
    Row,
    fits_rows,
    is_completed,
    read_rows,
    read_summary,
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
    build_strategy,
    calibration_of,
    evaluates_at_clients,
    server_model_of,
    task_of,
)
from fedhet.server_app.best_round import (
    BestModel,
    EarlyStopping,
    best_model_rule,
    check_measured,
    why_ended,
)
from fedhet.server_app.calibration import CalibrationError, add_coverage
from fedhet.server_app.checkpoint import Checkpoint, CheckpointWriter, load_checkpoint
from fedhet.server_app.class_counts import store_class_counts
from fedhet.server_app.columns import store_columns
from fedhet.server_app.evaluation import ServerEvaluation
from fedhet.server_app.initial_model import KEY as INITIAL
from fedhet.server_app.initial_model import fixed_metadata, load_initial_model
from fedhet.server_app.layer_diagnostics import observers_of
from fedhet.server_app.loggers import LoggedRun, Loggers
from fedhet.server_app.machine import machine
from fedhet.server_app.reused_training import check_reused_training
from fedhet.server_app.root_set import root_set_of
from fedhet.strategies.components.local_training_config import local_training_config
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    personal_names,
    shared_names,
)
from fedhet.strategies.round.client_snapshots import FILE, ClientSnapshots
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.wire.records import COLUMNS, to_record, to_tensors
from fedhet.strategies.wire.tensor_files import parameters_sha256, save_tensors
from fedhet.tasks import Functions, OwnTask, keep_freed_memory, make_repeatable, pick_device
from fedhet.tasks.models.own_weights import model_metadata
from fedhet.tasks.models.wrapped import WrappedModel

_SHOWN = 5  # changed keys in an error
_FEW, _SHOWN_CLIENTS = 1 / 16, 10  # of a batch, in a warning
STATES = "client_state"  # where the clients of a simulation store theirs, in the results directory


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
        code = fingerprint(recipe)["code"]
        self.made_by = {"code": code, **versions()}
        self.checkpoint_every, target = int(recipe.checkpoint.every), recipe.target_accuracy
        self.target = None if target is None else float(target)
        self.stopping = EarlyStopping(**plain_part(recipe, "early_stopping"))
        self.began, self.timeout = time.monotonic(), float(recipe.runtime.round_timeout_seconds)
        self.client_config = ConfigRecord()
        if recipe.runtime.simulation:
            self.client_config["state-folder"] = str(folder / STATES)
        if columns is not None:
            self.client_config[COLUMNS] = columns
        self.device = pick_device(recipe.device)
        make_repeatable(self.device)
        self.task = task_of(recipe, functions, columns)
        if reused := recipe.local.reuse_training:
            check_reused_training(recipe, Path(reused), self.task.classifier_tensors)
        self.data = self._data_used(columns)
        model = self.task.build_model(int(recipe.seed)).to(self.device)
        own = model_metadata(model, self.task.config.lora)
        self.metadata = {**self.task.label_metadata(), **own}
        channels_last = bool(recipe.runtime.channels_last) and not isinstance(model, WrappedModel)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        personal = TensorSelector(recipe.strategy.personal)
        self.has_personal = bool(personal_names(model, personal))
        self.names = shared_names(model, personal)
        self.metadata |= fixed_metadata(recipe, model)
        about, kept = ({}, {}) if last else load_initial_model(recipe, self.task, model, self.names)
        self.data |= about
        server_model = server_model_of(self.task, model)
        test = self.task.test_data(self.device, channels_last=channels_last)
        at_clients = evaluates_at_clients(recipe, has_test=test is not None)
        if (epochs := recipe.evaluation.finetune_epochs) and not at_clients:
            raise ConfigError(
                f"evaluation.finetune_epochs={epochs} is of the clients' evaluation, and this run "
                "has none: set evaluation.clients=true, or evaluation.finetune_epochs=0"
            )
        root, test_data = root_set_of(recipe, self.task, model, test)
        snapshots = [ClientSnapshots(folder / FILE)] if recipe.checkpoint.client_models else []
        self.recorders = observers_of(recipe, folder, server_model, test_data)
        self.strategy = build_strategy(
            recipe,
            self.task,
            server_model,
            [*snapshots, *self.recorders],
            root=root,
            evaluate_on_clients=at_clients,
        )
        self.evaluation = ServerEvaluation(
            recipe, self.task, self.names, server_model, test_data, self.strategy
        )
        self.calibration = calibration_of(
            recipe, model, self.strategy.server_step.output, self.strategy.client_sides
        )
        self.strategy.state.kept = kept
        state = model.state_dict()
        initial = {name: state[name] for name in self.names}
        self.arrays = self._restore(last) if last else to_record(initial)
        self.stop_reason: str | None = None
        self.last_report: RoundReport | None = None
        self._open(self.strategy.state.round if last else None, columns)

    def _data_used(self, columns: str | None) -> dict[str, Any]:
        """Return which data the run has, by split."""
        # the nodes of a deployment have training examples that a server may lack
        data = self.task.data_used(train=bool(self.recipe.runtime.simulation))
        return data if columns is None else {**data, "columns": {"sha256": text_sha256(columns)}}

    def _open(self, done: int | None, columns: str | None) -> None:
        """Open the results directory, after ``done`` rounds; None is for a new run."""
        recipe, folder = self.recipe, self.folder
        rule = best_model_rule(recipe, self.stopping)
        at_server = self.evaluation.test_data is not None or recipe.evaluation.model == "clients"
        check_measured(recipe, rule, self.task.predictions, at_server=at_server)
        self.results = ResultsFolder(folder, done)
        if columns is not None:
            store_columns(folder, columns)
        store_class_counts(recipe, folder, self.task)
        self.best_model = BestModel(folder, rule, done, self.results.rows) if rule else None
        self.checkpoints = CheckpointWriter(folder / "checkpoints")
        rows = self.results.rows  # of the run that is resumed
        self.elapsed_before = rows[-1].get("elapsed_seconds", 0.0) if rows else 0.0
        if done is not None and (reason := self._reached(rows)):  # it lacks no more than its end
            self.stop_reason, self.rounds = reason, rows[-1]["round"]
        for recorder in self.recorders:
            recorder.start(done)
        classifier_tensors = self.task.classifier_tensors
        self.results.write_config(config_yaml(recipe, classifier_tensors))
        plain = resolved(recipe, classifier_tensors)
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
                evaluate_fn=partial(self.evaluation.evaluate, last=self.rounds),
                on_round=self._on_round,
            )
            if 0 < self.rounds <= self.strategy.state.failed_rounds:
                if self.last_report is None:
                    raise ConfigError(
                        f"resume=true: all {self.rounds} rounds are done, and none had valid "
                        "replies: set rounds higher, or begin again in another results_dir"
                    )
                raise self.last_report.error(
                    f"no round of {self.recipe.rounds} had min_replies={self.recipe.min_replies} "
                    "valid replies, so the model is the initial one; the last failures: "
                    f"{self.last_report.reasons()} (metrics.jsonl in {self.folder} has all)"
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
        if read_label(last).get("recipe", self.fingerprint) != self.fingerprint:
            raise ConfigError(
                f"resume=true, but {last} was written by another recipe{self._changes()}; you may "
                f"change only {', '.join((*LONGER, *SITE_KEYS, *NOTES, *FOLDER_KEYS))} (its recipe "
                f"is {self.folder / CONFIG})"
            )
        checkpoint = load_checkpoint(last, self.names)
        self._check_not_done(checkpoint.state.round, last)
        if initial := checkpoint.data.get(INITIAL):  # its file is not needed any more
            self.data[INITIAL] = {"sha256": initial}
        hashes = self._data_hashes()
        if "columns" in checkpoint.data.keys() - hashes.keys():
            raise ConfigError(
                f"resume=true, but {self.folder} has lost its columns.json, which says how the "
                "sites' columns were fitted: bring it back, or begin anew in another results_dir"
            )
        for split in sorted(hashes.keys() & checkpoint.data.keys()):
            if hashes[split] != checkpoint.data[split]:
                what = split if split == "columns" else f"{split} examples"
                raise ConfigError(
                    f"resume=true, but the {what} are not those that the run began with: "
                    f"{self.data[split]}; {last} names the hash {checkpoint.data[split]}"
                )
        log(INFO, "Resuming after round %s", checkpoint.state.round)
        for name, found in checkpoint.made_by.items():
            if self.made_by.get(name) != found:
                text = "the rounds before had %s %s, and this run goes on with %s"
                log(WARNING, text, name, found, self.made_by.get(name))
        self.strategy.restore(checkpoint.state)
        return to_record(checkpoint.params)

    def _changes(self) -> str:
        """Return which keys the recipe has otherwise than the run that it would continue."""
        try:
            before: Any = OmegaConf.to_container(OmegaConf.load(self.folder / CONFIG))
        except (OSError, ValueError, YAMLError):
            return ""
        now = resolved(self.recipe, self.task.classifier_tensors)
        old, new = (dict(leaves(one)) for one in (before, now))
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        allowed = (*LONGER, *SITE_KEYS, *NOTES)
        keys = [key for key in changed if key.partition(".")[0] not in allowed]
        found = [f"{key}={new.get(key)}, was {old.get(key)}" for key in keys[:_SHOWN]]
        return f" ({'; '.join(found)})" if found else ""

    def _check_not_done(self, done: int, last: Path) -> None:
        metrics = self.folder / METRICS  # it may be lost, which is said already
        rows = read_rows(metrics) if is_completed(self.folder) and metrics.exists() else []
        # else it may lack no more than its end: its own, or that of an extension
        completed = is_completed(self.folder) and (
            not rows or fits_rows(read_summary(self.folder), rows)
        )
        if done > self.rounds or (done == self.rounds and completed):
            raise ConfigError(
                f"rounds={self.recipe.rounds} are done already: {last} is of round {done}; set "
                "rounds higher to continue"
            )
        rows = [row for row in rows if row["round"] <= done]
        if completed and (reason := self._reached(rows)):
            raise ConfigError(
                f"resume=true, but the run in {self.folder} has ended after round {done}: {reason};"
                " set early_stopping.patience or target_accuracy higher, or null, to continue"
            )

    def _data_hashes(self) -> dict[str, str]:
        return {split: str(about["sha256"]) for split, about in self.data.items()}

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
        test_data = self.evaluation.test_data
        if test_data is not None and not self.has_personal:  # else every client has its own model
            model = self.evaluation.model_of(to_tensors(arrays))
            add_coverage(found, model, test_data, classes, int(self.recipe.seed))
        return found

    def _on_round(self, report: RoundReport, arrays: ArrayRecord) -> bool:
        self._finish_checkpoint()
        elapsed = self.elapsed_before + time.monotonic() - self.began
        row = report.row() | {"elapsed_seconds": elapsed}
        if own := own_names(self.recipe.evaluation.metrics):
            row[OWN] = own
        self.last_report = report
        if report.round == 0 and self.rounds == 1 and not self.recipe.local.reuse_training:
            self._warn_of_last_steps()
        self.results.append(row)  # before the checkpoint: resuming drops rows it measures again
        self.loggers.log(row)
        self._check_finite(report)
        every, last = self.checkpoint_every, self.rounds
        self.stop_reason = self._reached(self.results.rows)
        reached = self.stop_reason is not None
        if self.best_model:
            run = self.strategy.state.experiment
            self.best_model.offer(self.results.rows, self.evaluation.output, run, self.metadata)
        due = reached or report.round == last or (every > 0 and report.round % every == 0)
        if report.round > 0 and due and report.fatal is None:  # a resumed run does it again
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

    def _warn_of_last_steps(self) -> None:
        """Say whose training ends with a step on few examples, where no later round mends it."""
        options = local_training_config(self.recipe.local, self.recipe.strategy.phases)
        size, sizes = options.batch_size, self.strategy.availability.registry.num_examples
        last = {client: options.last_batch(n) for client, n in sizes.items() if n > size}
        few = [f"{n} of client {client}" for client, n in last.items() if n <= size * _FEW]
        if few:
            log(
                WARNING,
                "the last batch of an epoch has few examples (local.batch_size=%s): %s. Its step "
                "is as long as any other and may undo much, and no later round mends that: "
                "local.drop_last=true leaves it out",
                size,
                ", ".join(few[:_SHOWN_CLIENTS]) + (", ..." if few[_SHOWN_CLIENTS:] else ""),
            )

    def _reached(self, rows: Sequence[Row]) -> str | None:
        """Return why the run ends with the last of its rows, if it does before its last round."""
        return why_ended(rows, self.target, self.stopping)

    def _begin_checkpoint(self, arrays: ArrayRecord) -> None:
        state, recipe = self.strategy.snapshot(), self.fingerprint
        rows, data = self.results.sha256, self._data_hashes()
        checkpoint = Checkpoint(to_tensors(arrays), state, recipe, rows, data, self.made_by)
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
        if math.isfinite(loss):
            return
        what = f"after round {report.round} the loss of the evaluated model is {loss}"
        if report.round == 0:
            raise DivergedError(
                f"{what}, and nothing has been trained yet: there is NaN or Inf in the test "
                "examples, or the initial model or the loss gives it"
            )
        raise DivergedError(
            f"{what}; {self.folder / 'checkpoints'} has the rounds before it (smaller steps may "
            "help: local.lr, local.clip, server.lr)"
        )

    def _about(self) -> dict[str, Any]:
        given = isinstance(self.task, OwnTask) and self.task.by_client  # nothing is divided
        return {
            **identity(self.recipe),
            # of clients=0, whoever registered
            "clients": int(self.recipe.clients) or self.strategy.num_clients,
            **({"partition": BY_CLIENT} if given else {}),
            "run": self.strategy.state.experiment,
            "data": self.data,
            "wall_seconds": time.monotonic() - self.began,
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
