"""What a run does around its rounds: a list of listeners, each a file here.

A :class:`Run <fedhet.server_app.run.Run>` calls ``on_start`` of each before its first round and
``on_round`` after every round, in the order of the list, and ``on_end`` at its end, in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.common.results import COMPLETED, Row

if TYPE_CHECKING:  # a sweep reads a run's early stopping without torch and Flower
    from flwr.app import ArrayRecord
    from flwr.serverapp import Grid

    from fedhet.strategies.base import Tensors
    from fedhet.strategies.round.round_report import RoundReport


@dataclass(frozen=True)
class Start:
    """A run before its first round, or before the one after ``done``."""

    folder: Path  # the results directory, absolute
    about: Mapping[str, Any]  # what summary.json says of the run: strategy, task, seed, ...
    config: Mapping[str, Any]  # the recipe, resolved
    rows: Sequence[Row] = ()  # of the rounds that are done
    done: int | None = None  # the last round of the run that is resumed; None of a new run


@dataclass
class Finished:
    """A finished round; a listener that ends the run with it sets ``stop_reason``."""

    report: RoundReport
    rows: Sequence[Row]  # of metrics.jsonl; this round's is the last one
    arrays: ArrayRecord  # x
    output: Tensors  # the model that a round evaluates
    last: int  # the round that the run ends with at the latest
    run: str = ""  # the run's id
    stop_reason: str | None = None

    @property
    def is_last(self) -> bool:
        """Whether no round follows."""
        return self.stop_reason is not None or self.report.round == self.last


@dataclass
class End:
    """How a run has ended; listeners add to ``about``."""

    status: str  # completed, diverged, stopped or failed
    error: str = ""
    about: dict[str, Any] = field(default_factory=dict)  # what summary.json says of the run
    grid: Grid | None = None  # of a completed run, to ask the clients
    arrays: ArrayRecord | None = None  # of a completed run: the model that it stores

    @property
    def is_completed(self) -> bool:
        """Whether all rounds are done."""
        return self.status == COMPLETED


class Listener:
    """Does nothing at any of the three moments; subclasses override them."""

    def on_start(self, start: Start) -> None:
        """Prepare; an error ends the run before its first round."""

    def on_round(self, finished: Finished) -> None:
        """Act on a finished round; an error ends the run."""

    def on_end(self, end: End) -> None:
        """Act on the end, of a run that has failed, too."""
