"""Messages between the grid and its workers, and the interface of a set of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import ArrayRecord, Message, RecordDict

from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold

Place = object  # address of a placed record, for the workers that returned it


@dataclass(frozen=True)
class Federation:
    """What a worker needs to act as any client of a run."""

    app: str  # the ClientApp, as "module:attribute"
    run_config: Mapping[str, bool | float | int | str]  # Flower's, with the recipe's overrides
    num_clients: int  # N; client i is node i + 1


@dataclass(frozen=True)
class WorkerTask:
    """A message to one client."""

    federation: Federation  # the client's; a worker may serve several in turn
    message: Message  # without the placed records
    placed: Mapping[str, Place]  # the placed records, by name
    names: Sequence[str]  # names of all records, in the message's order
    state: RecordDict  # state of the client's Context
    settings: Place | None = None  # of the worker's fold; None: the worker sends the reply


@dataclass(frozen=True)
class Answer:
    """A client's reply, and its ``Context``'s state afterwards."""

    reply: Message | None  # None: the worker has added it to its fold
    state: RecordDict
    num_examples: float | None  # as the reply reports
    seconds: float  # time that the client took


@dataclass(frozen=True)
class Collect:
    """Sent instead of a task: asks for the worker's fold."""


@dataclass(frozen=True)
class Lost:
    """Returned instead of an answer: the worker died with its tasks."""

    reason: str
    replaced: bool = True  # whether a new worker has its number; if not, no worker has it


class Workers(Protocol):
    """Numbered workers; each carries out its tasks one after the other, in order."""

    def __len__(self) -> int:
        """Return the number of workers."""

    def place(self, record: ArrayRecord | FoldSettings) -> Place:
        """Put a record, or the settings of a fold, where every worker can read it."""

    def forget(self) -> None:
        """Free all placed records; no task may be under way."""

    def send(self, worker: int, tasks: Sequence[WorkerTask]) -> None:
        """Give a worker tasks, to be answered together."""

    def collect(self, workers: Sequence[int]) -> tuple[Sequence[ReplyFold], Mapping[int, Lost]]:
        """Return folds with all replies of idle workers, and the workers that were lost."""

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Sequence[Answer] | Lost]]:
        """Return the answers to at most one ``send`` per worker.

        Wait up to ``timeout`` seconds for the first.
        """

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker at once and start another; return whether that one has started."""

    def close(self) -> None:
        """End all workers."""
