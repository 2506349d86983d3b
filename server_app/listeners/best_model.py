"""best.safetensors: the model of the best round so far, by a metric of the rows.

If rows are lost, the file's own record of its round still counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log
from omegaconf import DictConfig

from fedhet.common.checksums import MODEL, read_header
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.metrics import MetricName, metrics_of, row_name
from fedhet.server_app.listeners import End, Finished, Listener, Start
from fedhet.server_app.listeners.checkpoints import Checkpoints
from fedhet.server_app.listeners.stopping import EarlyStopping
from fedhet.strategies.wire.tensor_files import parameters_sha256, save_tensors
from fedhet.tasks.metrics import Predictions
from fedhet.tasks.models.own_weights import counted

BEST = "best.safetensors"


def best_model_rule(recipe: DictConfig, stopping: EarlyStopping) -> EarlyStopping | None:
    """Return the rule of ``checkpoint.best``: early stopping's for true; None for false."""
    metric = _best_metric(recipe)
    if metric is None:
        return None
    return stopping if metric == stopping.metric else EarlyStopping(metric)


def _best_metric(recipe: DictConfig) -> str | None:
    best = recipe.checkpoint.best
    return str(recipe.early_stopping.metric if best is True else best) if best else None


def check_measured(recipe: DictConfig, predictions: Predictions | None, *, at_server: bool) -> None:
    """Refuse a metric that nothing measures.

    Args:
        recipe: of the run.
        predictions: of the task; without classes it has no accuracy.
        at_server: whether the server evaluates.
    """
    best = _best_metric(recipe)
    named = {"checkpoint.best": best} if best else {}
    if recipe.early_stopping.patience is not None:
        named = {"early_stopping.metric": str(recipe.early_stopping.metric)} | named
    metrics = [row_name(word) for word in recipe.evaluation.metrics]
    if recipe.target_accuracy is not None:
        named["target_accuracy"] = "accuracy"
    without = predictions is None or predictions.kind != "classification"
    for key, metric in named.items():
        if without and "accuracy" not in metrics and MetricName.read(metric).name == "accuracy":
            raise ConfigError(
                f"{key} goes by {metric}, which task={recipe.task.name} does not measure: set "
                f"{_instead_of_accuracy(key, predictions)}"
            )
    if at_server:
        return
    for key, metric in named.items():
        if metric in ("accuracy", "loss", *metrics):
            raise ConfigError(
                f"{key} goes by {metric}, which the server measures, and it has no test examples: "
                "go by what the clients measure (evaluation.clients=true "
                "early_stopping.metric=client_accuracy), or give it some (task.test_data)"
            )


def _instead_of_accuracy(key: str, predictions: Predictions | None) -> str:
    """Return what to set if a key goes by an accuracy that the task does not measure."""
    if key != "target_accuracy":
        return "early_stopping.metric=loss, or name a metric of its kind (evaluation.metrics)"
    of_classes = predictions is not None and "accuracy" in metrics_of(predictions.kind)
    more = ", or add accuracy to evaluation.metrics" if of_classes else ""
    return f"target_accuracy=null{more}"


class BestModel(Listener):
    """Keeps the evaluated model of the best round as ``best.safetensors``.

    A better model is first written into ``checkpoints/`` and moved when the round's checkpoint is
    there: a run that is killed in between and resumed does these rounds again, and the file is
    still that of the rounds that are done.

    Args:
        rule: the metric, and what is better.
        checkpoints: of the run; this listener comes before them.
        metadata: of the file.
    """

    def __init__(
        self, rule: EarlyStopping, checkpoints: Checkpoints, metadata: Mapping[str, str]
    ) -> None:
        self.rule, self._checkpoints, self._metadata = rule, checkpoints, metadata
        self._path = checkpoints.folder.parent / BEST
        self._next = checkpoints.folder / BEST
        checkpoints.when_durable.append(self.keep)

    def on_start(self, start: Start) -> None:
        """Remove the files of rounds that are not done, or that were best by another rule."""
        done = start.done
        if done is None:
            for path in (self._path, self._next):
                path.unlink(missing_ok=True)
            return
        if self._next.exists():
            if _round_of(self._next) > done:
                self._next.unlink()
            else:
                self.keep()
        before = self.summary()
        if before and (later := _round_of(self._path)) > done:
            self._path.unlink()
            text = "removed %s: it held the model of round %s, and the run continues after round %s"
            log(WARNING, text, BEST, later, done)
            before = {}
        if before and before.get("metric") != self.rule.metric:
            self._path.unlink()
            text = "removed %s: it held the best model by %s; by %s, rounds after %s may be kept"
            log(WARNING, text, BEST, before.get("metric"), self.rule.metric, done)
        elif not before and (best := self.rule.best(start.rows)):
            text = "%s is written once a round beats %s %.6g of round %s, whose model was not kept"
            log(WARNING, text, BEST, self.rule.metric, best.value, best.round)

    def on_round(self, finished: Finished) -> None:
        """Write the evaluated model if its round is the best one."""
        self._checkpoints.wait()  # with the last one, the model that was written before is kept
        kept = self.summary()  # its row may be lost
        known = [{"round": kept["round"], kept["metric"]: kept["value"]}] if kept else []
        best = self.rule.best([*known, *finished.rows])
        if best is None or best.round != finished.rows[-1]["round"]:
            return
        self._next.parent.mkdir(parents=True, exist_ok=True)
        label = {"kind": MODEL, "run": finished.run, **vars(best), "metric": self.rule.metric}
        label["parameters_sha256"] = parameters_sha256(finished.output)
        metadata = counted(self._metadata, finished.rows[-1].get("num_steps"))
        save_tensors(self._next, finished.output, label, metadata)

    def on_end(self, end: End) -> None:
        """Say which round the file comes from."""
        if file := self.summary():
            end.about["best_model"] = file

    def keep(self) -> None:
        """Make the written model ``best.safetensors``: the rounds up to it are safe."""
        if self._next.exists():
            os.replace(self._next, self._path)
            log(INFO, "%s holds the model of round %s", BEST, _round_of(self._path))

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of the file; empty if there is none."""
        try:
            _, label = read_header(self._path)
        except (DamagedFileError, OSError):
            return {}
        about = ("round", "metric", "value", "parameters_sha256")
        return {"file": BEST, **{key: label[key] for key in about if key in label}}


def _round_of(path: Path) -> int:
    try:
        return int(read_header(path)[1].get("round", 0))
    except DamagedFileError:  # cut short: its round is done again
        return 1 << 62
