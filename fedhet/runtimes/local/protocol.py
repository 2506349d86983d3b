"""Messages between the grid and its workers, and the interface of a set of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import ArrayRecord, Message, RecordDict

Place = object  # address of a placed record; only the workers that returned it can read it


@dataclass(frozen=True)
class Federation:
    """What a worker needs to act as any client of a run.

    Attributes:
        app: the ClientApp, as "module:attribute".
        run_config: Flower's run config, from which the ClientApp composes the recipe.
        num_clients: N; client i is node i + 1.
    """

    app: str
    run_config: Mapping[str, bool | float | int | str]
    num_clients: int


@dataclass(frozen=True)
class Task:
    """A message to one client.

    Attributes:
        federation: the client's; workers may serve several, one after the other.
        message: without the placed records.
        placed: the placed records, by name.
        names: of all records, in the message's order.
        state: of the client's ``Context``.
    """

    federation: Federation
    message: Message
    placed: Mapping[str, Place]
    names: Sequence[str]
    state: RecordDict


@dataclass(frozen=True)
class Answer:
    """A client's reply, and its ``Context``'s state afterwards."""

    reply: Message
    state: RecordDict


@dataclass(frozen=True)
class Lost:
    """In place of an answer: the worker died with its tasks.

    Attributes:
        reason: why.
        replaced: whether a new worker has its number; if not, the number is out of use.
    """

    reason: str
    replaced: bool = True


class Workers(Protocol):
    """Numbered workers; each carries out its tasks one at a time, in order."""

    def __len__(self) -> int:
        """Return the number of workers."""

    def place(self, record: ArrayRecord) -> Place:
        """Put a record where every worker can read it."""

    def forget(self) -> None:
        """Free all placed records; no task may be under way."""

    def send(self, worker: int, task: Task) -> None:
        """Give a worker a task."""

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Answer | Lost]]:
        """Return at most one answer per worker; wait up to ``timeout`` seconds for the first."""

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker at once and start another; return whether that one has started."""

    def close(self) -> None:
        """End all workers."""
