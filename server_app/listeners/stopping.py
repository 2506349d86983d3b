"""Rounds after which a run ends early: early stopping, the target accuracy, and divergence.

The first two follow from the rows of metrics.jsonl, so a resumed run ends after the same round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedhet.common.errors import DivergedError
from fedhet.common.metrics import larger_is_better
from fedhet.common.results import Row
from fedhet.server_app.listeners import End, Finished, Listener

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
    """Return the reason for stopping early after the last row, or None."""
    accuracy = rows[-1].get("accuracy") if rows else None
    if target is not None and (accuracy or -1.0) >= target:
        return f"accuracy {accuracy:.6g} reached target_accuracy={target}"
    return stopping.stop_reason(rows)


class Stopping(Listener):
    """Ends a run that has reached its target accuracy or has stopped improving.

    Args:
        target: the accuracy; None without one.
        rule: of early stopping.
        rows: of metrics.jsonl, as far as they are there; rounds add to them.

    Attributes:
        reason: why the run ends now; None if it goes on. A resumed run may have one at its start.
    """

    def __init__(self, target: float | None, rule: EarlyStopping, rows: Sequence[Row]) -> None:
        self._target, self._rule, self._rows = target, rule, rows
        self.reason = why_ended(rows, target, rule)

    def on_round(self, finished: Finished) -> None:
        """End the run if there is a reason."""
        self.reason = finished.stop_reason = why_ended(finished.rows, self._target, self._rule)

    def on_end(self, end: End) -> None:
        """Say why the run ended before its last round, and which round was the best one."""
        if self.reason:
            end.about["stop_reason"] = self.reason
        if self._rule.patience is not None:
            end.about["best_round"] = self._rule.summary(self._rows)


class Divergence(Listener):
    """Raises a DivergedError after a round whose loss is NaN or Inf; ``folder`` is the run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_round(self, finished: Finished) -> None:
        """Check the loss of the evaluated model."""
        round, loss = finished.report.round, finished.report.evaluation.get("loss", 0.0)
        if math.isfinite(loss):
            return
        what = f"after round {round} the loss of the evaluated model is {loss}"
        if round == 0:
            raise DivergedError(
                f"{what}, and nothing has been trained yet: the test examples contain NaN or Inf, "
                "or the initial model or the loss returns it"
            )
        raise DivergedError(
            f"{what}; {self._folder / 'checkpoints'} has the rounds before it (smaller steps may "
            "help: local.lr, local.clip, server.lr)"
        )
