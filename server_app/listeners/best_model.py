"""The best round so far by a metric: early stopping, and the file of its model.

Both follow from the rows of metrics.jsonl, so a resumed run goes on as if it had not ended; where
rows are lost, what the file says of its round still counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

from flwr.common.logger import log
from omegaconf import DictConfig

from fedhet.common.checksums import MODEL, read_header
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.metrics import evaluation_of, larger_is_better, metrics_of, row_name
from fedhet.common.results import Row
from fedhet.strategies.base import Tensors
from fedhet.strategies.round.tensor_files import parameters_sha256, save_tensors
from fedhet.tasks.metrics import Predictions

BEST = "best.safetensors"
Mode = Literal["auto", "min", "max"]


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    round: int
    value: float


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run whose metric has stopped improving.

    An evaluation improves when its value is better than the last improvement's by more than
    ``min_delta``; NaN improves nothing. After ``patience`` evaluations in a row without an
    improvement the run ends. All rows that have the metric count, the initial model's (round 0)
    too, but those of rounds without a valid reply, which leave the model as it was.
    """

    metric: str = "accuracy"
    patience: int | None = None  # None: the run has all its rounds
    min_delta: float = 0.0
    # auto: losses and errors are minimised, other metrics maximised; never of the user's own
    mode: Mode = "auto"

    @property
    def maximises(self) -> bool:
        """Whether larger values are better."""
        return larger_is_better(self.metric) if self.mode == "auto" else self.mode == "max"

    def best(self, rows: Sequence[Row]) -> Best | None:
        """Return the first of the best evaluations; None without any."""
        sign = 1.0 if self.maximises else -1.0
        return max(self._values(rows), key=lambda one: sign * one.value, default=None)

    def evaluations_without_improvement(self, rows: Sequence[Row]) -> int:
        """Return how many evaluations have passed since the last improvement."""
        sign, reference, passed = 1.0 if self.maximises else -1.0, -math.inf, 0
        measured = [row for row in rows if self.metric in row and _has_trained(row)]
        for value in (row[self.metric] for row in measured):
            if value is not None and sign * value > reference + self.min_delta:
                reference, passed = sign * value, 0
            else:
                passed += 1
        return passed

    def stop_reason(self, rows: Sequence[Row]) -> str | None:
        """Return why the run ends now; None if it goes on."""
        if self.patience is None or not rows or self.metric not in rows[-1]:
            return None
        passed = self.evaluations_without_improvement(rows)
        if passed < self.patience:
            return None
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        best = self.best(rows)
        where = f"; best: {best.value:.6g} in round {best.round}" if best else ""
        return (
            f"early stopping: {self.metric} has not improved{more} in the last {passed} "
            f"evaluations (early_stopping.patience={self.patience}){where}"
        )

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return what summary.json says of the best round."""
        best = self.best(rows)
        return {"metric": self.metric, **({} if best is None else vars(best))}

    def _values(self, rows: Sequence[Row]) -> list[Best]:
        pairs = [(row["round"], row.get(self.metric)) for row in rows]
        return [
            Best(int(round), float(value))
            for round, value in pairs
            if value is not None and math.isfinite(value)
        ]


def _has_trained(row: Row) -> bool:
    return row["round"] == 0 or row.get("clients") != []


def why_ended(rows: Sequence[Row], target: float | None, stopping: EarlyStopping) -> str | None:
    """Return why a run ends with the last of its rows, if it does before its last round."""
    accuracy = rows[-1].get("accuracy") if rows else None
    if target is not None and (accuracy or -1.0) >= target:
        return f"accuracy {accuracy:.6g} reached target_accuracy={target}"
    return stopping.stop_reason(rows)


def best_model_rule(recipe: DictConfig, stopping: EarlyStopping) -> EarlyStopping | None:
    """Return the rule of ``checkpoint.best``: early stopping's for true; None for false."""
    chosen = recipe.checkpoint.best
    if not chosen:
        return None
    rule = EarlyStopping(str(chosen))
    if chosen is True or chosen == stopping.metric:
        rule = stopping
    if rule.metric.startswith("received_"):
        raise ConfigError(
            f"checkpoint.best={chosen} goes by {rule.metric}, which is of the model before a round "
            "and not of the one that is kept: choose another metric, such as "
            f"{rule.metric.replace('received_', 'client_')}"
        )
    return rule


def check_measured(
    recipe: DictConfig,
    best: EarlyStopping | None,
    predictions: Predictions | None,
    *,
    at_server: bool,
) -> None:
    """Refuse to go by what nothing measures.

    Args:
        recipe: of the run.
        best: the rule of ``checkpoint.best``.
        predictions: of the task; without classes it has no accuracy.
        at_server: whether the server evaluates.
    """
    named = (
        {"early_stopping.metric": recipe.early_stopping.metric}
        if (recipe.early_stopping.patience is not None)
        else {}
    )
    named |= {"checkpoint.best": best.metric} if best else {}
    metrics = [row_name(word) for word in recipe.evaluation.metrics]
    if recipe.target_accuracy is not None:
        named["target_accuracy"] = "accuracy"
    for key, metric in named.items():
        without = predictions is None or predictions.kind != "classification"
        measured = metric.removeprefix(evaluation_of(metric)) in metrics
        if without and not measured and metric.endswith("accuracy"):
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
    """Return what to set where a key goes by an accuracy that the task does not measure."""
    if key != "target_accuracy":
        return "early_stopping.metric=loss, or name a metric of its kind (evaluation.metrics)"
    of_classes = predictions is not None and "accuracy" in metrics_of(predictions.kind)
    more = ", or add accuracy to evaluation.metrics" if of_classes else ""
    return f"target_accuracy=null{more}"


class BestModel:
    """Keeps the evaluated model of the best round as ``best.safetensors``.

    A better model is first written into ``checkpoints/`` and moved when the round's checkpoint is
    there: a run that is killed in between and resumed does these rounds again, and the file is
    still that of the rounds that are done.

    Args:
        folder: the results directory.
        rule: the metric, and what is better.
        done: the round that the run is resumed after; None starts afresh.
        rows: of the rounds up to it.
    """

    def __init__(
        self, folder: Path, rule: EarlyStopping, done: int | None, rows: Sequence[Row] = ()
    ) -> None:
        self.rule = rule
        self._path, self._next = folder / BEST, folder / "checkpoints" / BEST
        if done is None:
            for path in (self._path, self._next):
                path.unlink(missing_ok=True)
        elif self._next.exists():
            if _round_of(self._next) > done:
                self._next.unlink()
            else:
                self.keep()
        before = {} if done is None else self.summary()
        if done is not None and before and (later := _round_of(self._path)) > done:
            self._path.unlink()
            text = "%s was of round %s and is gone: the run continues after round %s"
            log(WARNING, text, BEST, later, done)
            before = {}
        if before and before.get("metric") != rule.metric:
            self._path.unlink()
            text = "%s was by %s and is gone: by %s a round after %s may be kept, if it is the best"
            log(WARNING, text, BEST, before.get("metric"), rule.metric, done)
        elif done is not None and not before and (best := rule.best(rows)):
            text = "%s is kept from now on: a round has to beat %s %.6g of round %s, which has none"
            log(WARNING, text, BEST, rule.metric, best.value, best.round)

    def offer(
        self, rows: Sequence[Row], tensors: Tensors, run: str, metadata: Mapping[str, str]
    ) -> None:
        """Write the evaluated model of the last row's round if that is the best one."""
        kept = self.summary()  # its row may be lost
        known = [{"round": kept["round"], kept["metric"]: kept["value"]}] if kept else []
        best = self.rule.best([*known, *rows])
        if best is None or best.round != rows[-1]["round"]:
            return
        self._next.parent.mkdir(parents=True, exist_ok=True)
        label = {"kind": MODEL, "run": run, "round": best.round, "metric": self.rule.metric}
        label |= {"value": best.value, "parameters_sha256": parameters_sha256(tensors)}
        save_tensors(self._next, tensors, label, metadata)

    def keep(self) -> None:
        """Make the written model ``best.safetensors``: the rounds up to it are safe."""
        if self._next.exists():
            os.replace(self._next, self._path)
            log(INFO, "%s is of round %s", BEST, _round_of(self._path))

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
