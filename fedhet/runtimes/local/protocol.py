"""Messages between the grid and its workers, and the interface of a set of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import ArrayRecord, Message, RecordDict

from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold

Place = object  # address of a placed record; only the workers that returned it can read it


@dataclass(frozen=True)
class Federation:
    """What a worker needs to act as any client of a run."""

    app: str  # the ClientApp, as "module:attribute"
    run_config: Mapping[str, bool | float | int | str]  # Flower's, with the recipe's overrides
    num_clients: int  # N; client i is node i + 1


@dataclass(frozen=True)
class Task:
    """A message to one client."""

    federation: Federation  # the client's; workers may serve several, one after the other
    message: Message  # without the placed records
    placed: Mapping[str, Place]  # the placed records, by name
    names: Sequence[str]  # of all records, in the message's order
    state: RecordDict  # of the client's Context
    settings: Place | None = None  # of the fold that the worker adds the reply to; None: it is sent


@dataclass(frozen=True)
class Answer:
    """A client's reply, and its ``Context``'s state afterwards."""

    reply: Message | None  # None: the worker has added it to its fold
    state: RecordDict
    num_examples: float | None  # that the reply reports
    seconds: float  # that it took


@dataclass(frozen=True)
class Collect:
    """In place of a task: asks for the worker's fold."""


@dataclass(frozen=True)
class Lost:
    """In place of an answer: the worker died with its tasks."""

    reason: str
    replaced: bool = True  # whether a new worker has its number; else that is out of use


class Workers(Protocol):
    """Numbered workers; each carries out what it is sent one after the other, in order."""

    def __len__(self) -> int:
        """Return the number of workers."""

    def place(self, record: ArrayRecord | FoldSettings) -> Place:
        """Put a record, or the settings of a fold, where every worker can read it."""

    def forget(self) -> None:
        """Free all placed records; no task may be under way."""

    def send(self, worker: int, tasks: Sequence[Task]) -> None:
        """Give a worker tasks, to be answered together."""

    def collect(self, workers: Sequence[int]) -> tuple[Sequence[ReplyFold], Mapping[int, Lost]]:
        """Return parts that hold all replies that idle workers have folded, and who was lost."""

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Sequence[Answer] | Lost]]:
        """Return the answers to one ``send`` per worker at most.

        Wait up to ``timeout`` seconds for the first.
        """

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker at once and start another; return whether that one has started."""

    def close(self) -> None:
        """End all workers."""
