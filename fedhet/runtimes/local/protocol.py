"""What passes between the grid and its workers, and the interface of a set of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import ArrayRecord, Message, RecordDict

Place = object  # where a placed record lies: only the workers that gave it out can read it


@dataclass(frozen=True)
class Federation:
    """What a worker must know to be any client of a run.

    Attributes:
        app: the ClientApp, as "module:attribute".
        run_config: Flower's run config, which the ClientApp composes the recipe from.
        num_clients: N; the node of client i has the id i + 1.
    """

    app: str
    run_config: Mapping[str, bool | float | int | str]
    num_clients: int


@dataclass(frozen=True)
class Task:
    """A message to one client.

    Attributes:
        federation: whose client it is; workers may serve several, one after the other.
        message: without the records that are placed.
        placed: those, by name.
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
    """A client's reply and its ``Context``'s state after it."""

    reply: Message
    state: RecordDict


@dataclass(frozen=True)
class Lost:
    """Instead of an answer: the worker is gone, and the tasks that it had with it.

    Attributes:
        reason: why.
        replaced: whether another stands in its place; if not, its number is out of use.
    """

    reason: str
    replaced: bool = True


class Workers(Protocol):
    """Some workers, by number. Each does its tasks one at a time, in the order they were sent."""

    def __len__(self) -> int:
        """Return how many there are."""

    def place(self, record: ArrayRecord) -> Place:
        """Put a record where every worker can read it."""

    def forget(self) -> None:
        """Free everything that was placed; no task may be under way."""

    def send(self, worker: int, task: Task) -> None:
        """Give a worker a task."""

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Answer | Lost]]:
        """Return at most one answer a worker; wait up to that many seconds for the first."""

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker, whatever it does, and start another in its place; return if one did."""

    def close(self) -> None:
        """End all workers."""
