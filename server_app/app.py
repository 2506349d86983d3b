"""The ServerApp: a recipe in, a results directory out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig, OmegaConf
from torch import nn

from common.errors import ConfigError
from common.results import ResultsFolder
from conf import (
    FOLDER_KEYS,
    LONGER,
    NOTES,
    SITE_KEYS,
    build_part,
    compose,
    config_yaml,
    fingerprint,
    method_name,
    plain_part,
    resume_fingerprint,
    versions,
)
from server_app.assembly import build_strategy, calibration_of, check_recipe, network_of
from server_app.calibration import CalibrationError, add_coverage
from server_app.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from server_app.layer_diagnostics import observers_of
from server_app.loggers import LoggedRun, Loggers
from server_app.machine import machine, usable_cpus
from server_app.polling_grid import with_fast_polling
from server_app.reused_training import check_reused_training
from strategies.base import Tensors
from strategies.components.tensor_selection import TensorSelector, personal_names, shared_names
from strategies.round.client_snapshots import FILE, ClientSnapshots
from strategies.round.records import to_metrics, to_record, to_tensors
from strategies.round.round_report import RoundReport
from strategies.round.tensor_files import parameters_sha256, save_tensors
from tasks import build_task, keep_freed_memory, pick_device
from tasks.evaluation import evaluate_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Compose the recipe, check it, run it."""
    recipe = compose(context.run_config)
    folder = results_folder(recipe)
    last = last_checkpoint(recipe, folder)
    try:
        run = Run(recipe, folder, last)
    except Exception as error:
        if last is None:  # else the folder holds a run's summary, which this is not a part of
            with said_if_impossible(folder):
                write_failure(ResultsFolder(folder), {}, error)
        raise
    run.start(with_fast_polling(grid))


def results_folder(recipe: DictConfig) -> Path:
    """Return the run's results directory; by default a new one under ~/fedhet-results."""
    if recipe.results_dir:
        folder = Path(recipe.results_dir).expanduser()
        if not folder.is_absolute():
            raise ConfigError(
                f"results_dir={recipe.results_dir} must be absolute here: Flower starts the "
                "ServerApp in a directory of its own"
            )
        return folder
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}_{method_name(recipe)}_{recipe.task.name}_seed{recipe.seed}"
    return Path.home() / "fedhet-results" / name


def last_checkpoint(recipe: DictConfig, folder: Path) -> Path | None:
    """Return the checkpoint to resume from, None for a fresh run.

    Raises:
        ConfigError: if a fresh run would overwrite another, or there is nothing to resume.
    """
    found = checkpoints(folder / "checkpoints")
    if recipe.resume and not found:
        raise ConfigError(
            f"resume=true, but results_dir={folder} holds no checkpoint; set resume=false to start "
            "afresh"
        )
    metrics = folder / "metrics.jsonl"
    if not recipe.resume and (found or (metrics.exists() and metrics.stat().st_size > 0)):
        raise ConfigError(
            f"results_dir={folder} holds a run already; set resume=true to go on with it, or "
            "another results_dir"
        )
    return found[-1] if found else None


class Run:
    """One run of a recipe: task, strategy and results directory, checked before round 1.

    Args:
        recipe: the composed recipe.
        folder: the results directory, absolute.
        last: the checkpoint to resume from, or None.
    """

    def __init__(self, recipe: DictConfig, folder: Path, last: Path | None) -> None:
        check_recipe(recipe)
        self.loggers = Loggers(build_part(recipe, "logger", classifier_tensors=0))
        keep_freed_memory()
        torch.set_num_threads(1)  # idle threads of a pool would spin on the simulated clients' CPUs
        self.recipe, self.folder = recipe, folder
        self.began = time.time()
        self.device = pick_device(recipe.device)
        self.task = build_task(
            plain_part(recipe, "task"),
            plain_part(recipe, "partition"),
            seed=int(recipe.seed),
            num_clients=int(recipe.clients) or 1,
        )
        if recipe.local.reuse_training:
            reuse_training = Path(recipe.local.reuse_training)
            check_reused_training(recipe, reuse_training, self.task.classifier_tensors)
        channels_last = bool(recipe.runtime.channels_last)
        self.model = self.task.build_model(int(recipe.seed)).to(self.device)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.personal = TensorSelector(recipe.strategy.personal)
        self.names = shared_names(self.model, self.personal)
        self.network = network_of(self.task, self.model)
        kept = [ClientSnapshots(folder / FILE)] if recipe.checkpoint.client_models else []
        self.test_data = self.task.test_data(self.device, channels_last=channels_last)
        observers = observers_of(recipe, folder, self.network, self.test_data)
        self.strategy = build_strategy(recipe, self.task, self.network, kept, observers)
        self.calibration = calibration_of(recipe, self.model, self.strategy.server_step.output)
        self.arrays = self._restore(last) if last else self._initial_arrays()
        done = self.strategy.state.round if last else None
        self.results = ResultsFolder(folder, done)
        rows = self.results.rows  # of the processes that a resumed run goes on from
        self.elapsed_before = rows[-1].get("elapsed_seconds", 0.0) if rows else 0.0
        for observer in observers:
            observer.start(done)
        config = config_yaml(recipe, self.task.classifier_tensors)
        self.results.write_config(config)
        self.loggers.start(self._logged_run(config))

    def start(self, grid: Grid) -> None:
        """Run the rounds; the summary is written whether they end well or not."""
        try:
            result = self.strategy.start(
                grid,
                self.arrays,
                num_rounds=int(self.recipe.rounds),
                timeout=float(self.recipe.runtime.round_timeout_seconds),
                train_config=self._for_clients(),
                evaluate_config=self._for_clients(),
                evaluate_fn=self._evaluate,
                on_round=self._on_round,
            )
            self._require_a_round()
            params = to_tensors(result.arrays)
            save_tensors(self.folder / "model.safetensors", params, self.task.label_metadata())
            about = self._about() | {"parameters_sha256": parameters_sha256(params)}
            if self.calibration.alphas:
                about["prediction_sets"] = self._calibrate(grid, result.arrays)
            summary = self.results.summary(about, "completed")
        except BaseException as error:
            with said_if_impossible(self.folder):
                self.loggers.finish(write_failure(self.results, self._about(), error))
            raise
        try:
            self.loggers.finish(summary)
        finally:  # last, since a launcher ends what is left of a run that is completed
            self.results.write_summary(summary)
        log(INFO, "Results are in %s", self.folder)

    # ---- pieces ------------------------------------------------------------------------------

    def _require_a_round(self) -> None:
        """Refuse to call a run completed that has fewer rounds than may fail, and lost them all."""
        if self.strategy.state.failed_rounds >= int(self.recipe.rounds):
            raise RuntimeError(
                f"no round of {self.recipe.rounds} had min_replies={self.recipe.min_replies} valid "
                f"replies, so the model is the initial one; metrics.jsonl in {self.folder} says why"
            )

    def _for_clients(self) -> ConfigRecord:
        """Return what clients are told of the run: where those of a simulation keep their state."""
        return ConfigRecord({"state-folder": str(self.folder / "client_state")})

    def _logged_run(self, config: str) -> LoggedRun:
        plain = OmegaConf.to_container(OmegaConf.create(config))
        assert isinstance(plain, dict)
        named = {str(key): value for key, value in plain.items()}
        return LoggedRun(self.folder, self._about(), named, list(self.results.rows))

    def _initial_arrays(self) -> ArrayRecord:
        state = self.model.state_dict()
        return to_record({name: state[name] for name in self.names})

    def _restore(self, last: Path) -> ArrayRecord:
        checkpoint = load_checkpoint(last, self.names)
        if checkpoint.recipe != resume_fingerprint(self.recipe):
            raise ConfigError(
                f"resume=true, but {last} was written by another recipe; allowed to change are "
                f"{', '.join((*LONGER, *SITE_KEYS, *NOTES, *FOLDER_KEYS))} (its recipe is "
                f"{self.folder / 'config.yaml'})"
            )
        if checkpoint.state.round >= int(self.recipe.rounds):
            raise ConfigError(
                f"rounds={self.recipe.rounds} are done already: {last} is of round "
                f"{checkpoint.state.round}; set rounds higher to go on"
            )
        log(INFO, "Resuming after round %s", checkpoint.state.round)
        self.strategy.restore(checkpoint.state)
        return to_record(checkpoint.params)

    def _evaluate(self, round: int, arrays: ArrayRecord) -> MetricRecord | None:
        every, last = int(self.recipe.evaluation.every), int(self.recipe.rounds)
        if round != last and (every == 0 or round % every != 0):
            return None
        if round > 0 and self.recipe.evaluation.model == "clients":
            return self._score_of_clients()
        output_model = self._network_of(to_tensors(arrays))
        torch.set_num_threads(usable_cpus())  # no client trains meanwhile
        loss, accuracy = evaluate_model(output_model, self.test_data, self.task.loss)
        torch.set_num_threads(1)
        if accuracy is None:  # the task is no classification
            return MetricRecord({"loss": loss})
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    def _network_of(self, tensors: Tensors) -> nn.Module:
        """Return the network with these tensors: the task's, or the one that a round gave out."""
        if tensors.keys() != set(self.names):
            return self.strategy.network_of(tensors)
        self.network.load(tensors)
        return self.model

    def _calibrate(self, grid: Grid, arrays: ArrayRecord) -> dict[str, Any]:
        """Have the clients calibrate prediction sets, and count on the test set.

        The rounds are done: where it cannot be, the run has completed all the same.
        """
        classes = self.task.num_classes
        try:
            found = self.calibration.run(
                lambda kind, asked: self.strategy.ask_clients(
                    grid, kind, arrays, ConfigRecord({**asked, **self._for_clients()})
                ),
                classes,
            )
        except (CalibrationError, TimeoutError) as error:
            log(ERROR, "no prediction sets: %s", error)
            return {"error": str(error)}
        if not personal_names(self.model, self.personal):  # else every client has its own model
            model = self._network_of(to_tensors(arrays))
            add_coverage(found, model, self.test_data, classes, int(self.recipe.seed))
        return found

    def _score_of_clients(self) -> MetricRecord | None:
        """Return the mean of the clients' models: on the global test set, or else on their own."""
        scores = self.strategy.personal_scores()
        kind = "personal-test-" if "personal-test-loss" in scores else "personal-"
        found = {
            name: scores[kind + name] for name in ("accuracy", "loss") if kind + name in scores
        }
        return to_metrics(found) if found else None

    def _on_round(self, report: RoundReport, arrays: ArrayRecord) -> bool:
        elapsed = self.elapsed_before + time.time() - self.began
        row = report.row() | {"elapsed_seconds": elapsed}
        self.results.append(
            row
        )  # before the checkpoint: a resumed run drops rows it measures again
        self.loggers.log(row)
        every, last = int(self.recipe.checkpoint.every), int(self.recipe.rounds)
        target = self.recipe.target_accuracy
        reached = target is not None and report.evaluation.get("accuracy", -1.0) >= float(target)
        due = reached or report.round == last or (every > 0 and report.round % every == 0)
        if report.round > 0 and due:
            self._save_checkpoint(arrays)
        shown = ("accuracy", "loss", "train_loss")
        figures = "  ".join(f"{name} {row[name]:.4f}" for name in shown if name in row)
        log(INFO, "[round %s/%s] %s  %.2f s", report.round, last, figures, report.seconds)
        return reached

    def _save_checkpoint(self, arrays: ArrayRecord) -> None:
        checkpoint = Checkpoint(
            to_tensors(arrays), self.strategy.snapshot(), resume_fingerprint(self.recipe)
        )
        save_checkpoint(self.folder / "checkpoints", checkpoint)
        self.strategy.mark_durable()

    def _about(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "strategy": method_name(recipe),
            "task": recipe.task.name,
            "model": recipe.task.model,
            "partition": recipe.partition.name,
            "clients": int(recipe.clients),
            "seed": int(recipe.seed),
            "wall_seconds": time.time() - self.began,
            "versions": versions(),
            "machine": machine(self.device),
            "fingerprint": fingerprint(recipe),
        }


def write_failure(
    results: ResultsFolder, about: Mapping[str, Any], error: BaseException
) -> dict[str, Any]:
    """Write the summary of a run that an error has ended, and return what is in it."""
    summary = results.summary(about, "failed", f"{type(error).__name__}: {error}")
    results.write_summary(summary)
    return summary


@contextlib.contextmanager
def said_if_impossible(folder: Path) -> Iterator[None]:
    """Log that a folder cannot be written to; the error that is on its way tells more."""
    try:
        yield
    except OSError as error:
        log(ERROR, "summary.json in %s could not be written: %s", folder, error)
