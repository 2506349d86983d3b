"""Flower's Grid over warm workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedhet.runtimes.local.protocol import Answer, Federation, Lost, Place, Task, Workers
from fedhet.runtimes.local.worker import identify

_INLINE_BYTES = 1 << 14  # a record that only one client gets is placed from this size on
_COUNT = "num-examples"


@dataclass(frozen=True)
class _Waiting:
    """A message that was pushed: its task, and how long it may take compared with others."""

    task: Task
    size: float

    @property
    def message_id(self) -> str:
        return str(self.task.message.metadata.message_id)

    @property
    def node_id(self) -> int:
        return int(self.task.message.metadata.dst_node_id)


class WorkerGrid(Grid):
    """Delivers messages to workers that play the clients.

    A record that several messages share, as the global model, is placed once for all workers.
    Clients with more examples go first, so that no worker is left alone with a long one at the
    end. What a ClientApp keeps in ``Context.state`` stays here and travels with its next message.

    Args:
        workers: play the clients.
        federation: whom they play.
    """

    def __init__(self, workers: Workers, federation: Federation) -> None:
        identify()
        self._workers = workers
        self._federation = federation
        self._run = Run.create_empty(run_id=1)
        self._numbers = itertools.count(1)
        self._queue: list[_Waiting] = []  # longest last
        # by worker, the task it is at, and one that it finds when it has done that
        self._given: dict[int, list[_Waiting]] = {worker: [] for worker in range(len(workers))}
        self._replies: dict[str, Message] = {}
        self._examples: dict[int, float] = {}
        self._states: dict[int, RecordDict] = {}

    # ---- Flower's interface ----------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        """Set the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; deprecated by Flower in favour of ``Message``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return 1 to N."""
        return range(1, self._federation.num_clients + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the workers; return their ids."""
        pushed = list(messages)
        if not self._queue and not any(self._given.values()):
            self._workers.forget()
        places = self._place_records(pushed)
        new = [self._waiting(message, places) for message in pushed]
        self._queue = sorted([*self._queue, *reversed(new)], key=lambda waiting: waiting.size)
        self._dispatch()
        return [waiting.message_id for waiting in new]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that are there."""
        self._collect(timeout=0.0)
        here = [message_id for message_id in message_ids if message_id in self._replies]
        return [self._replies.pop(message_id) for message_id in here]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and yield the replies as they come.

        What has not come after ``timeout`` seconds is given up: its workers are replaced, since a
        client that goes on training would take a core from the next round.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._receive(set(self.push_messages(messages)), deadline)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    # ---- pieces ----------------------------------------------------------------------------------

    def _receive(self, message_ids: set[str], deadline: float | None) -> Iterator[Message]:
        while message_ids:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._collect(left)
            here = [message_id for message_id in message_ids if message_id in self._replies]
            message_ids.difference_update(here)
            for message_id in here:
                yield self._replies.pop(message_id)
            if left == 0.0:
                self._give_up(message_ids)
                return

    def _place_records(self, messages: Sequence[Message]) -> dict[int, Place]:
        """Return the places of all records that are shared or large, by the records' ids."""
        records: dict[int, ArrayRecord] = {}
        uses: dict[int, int] = {}
        for message in messages:
            for record in message.content.array_records.values():
                records[id(record)] = record
                uses[id(record)] = uses.get(id(record), 0) + 1
        return {
            key: self._workers.place(record)
            for key, record in records.items()
            if uses[key] > 1 or _num_bytes(record) >= _INLINE_BYTES
        }

    def _waiting(self, message: Message, places: dict[int, Place]) -> _Waiting:
        node_id = message.metadata.dst_node_id
        if node_id not in self.get_node_ids():
            raise ValueError(f"node {node_id} is not one of 1..{self._federation.num_clients}")
        message.metadata.__dict__["_message_id"] = str(next(self._numbers))  # as Flower's grids do
        content = message.content
        placed = {
            name: places[id(record)]
            for name, record in content.array_records.items()
            if id(record) in places
        }
        rest = RecordDict({name: content[name] for name in content if name not in placed})
        bare = Message(metadata=message.metadata, content=rest)  # type: ignore[call-overload]
        state = self._states.get(node_id, RecordDict())
        size = self._examples.get(node_id, float("inf"))  # the unknown first
        return _Waiting(Task(self._federation, bare, placed, list(content), state), size)

    def _dispatch(self) -> None:
        if self._queue and not self._given:
            raise RuntimeError("all workers are gone, and no other could be started")
        for depth in (0, 1):
            for worker, given in self._given.items():
                # A second task spares a worker the wait for the server. The last tasks are not
                # given ahead: they go to whoever is free first.
                if len(given) == depth and len(self._queue) > depth * len(self._given):
                    given.append(self._queue.pop())
                    self._workers.send(worker, given[-1].task)

    def _collect(self, timeout: float | None) -> None:
        if not any(self._given.values()):
            return
        done = []
        for worker, outcome in self._workers.wait(timeout):
            done.append((self._given[worker].pop(0), outcome))
            if isinstance(outcome, Lost):
                self._take_back(worker, replaced=outcome.replaced)
        self._dispatch()  # before anything else: an idle worker is a lost core
        for waiting, outcome in done:
            self._replies[waiting.message_id] = self._reply(waiting, outcome)

    def _take_back(self, worker: int, *, replaced: bool) -> None:
        """Queue again what was given to a worker that is gone."""
        self._queue += self._given.pop(worker)
        if replaced:
            self._given[worker] = []

    def _reply(self, waiting: _Waiting, outcome: Answer | Lost) -> Message:
        if isinstance(outcome, Lost):
            error = Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=outcome.reason)
            return Message(error, reply_to=waiting.task.message)
        if outcome.state:
            self._states[waiting.node_id] = outcome.state
        examples = _examples(outcome.reply)
        if examples is not None:
            self._examples[waiting.node_id] = examples
        return outcome.reply

    def _give_up(self, message_ids: set[str]) -> None:
        for worker, given in list(self._given.items()):
            if given and given[0].message_id in message_ids:
                reason = f"client {given[0].node_id - 1} took too long"
                self._take_back(worker, replaced=self._workers.replace(worker, reason))
        self._queue = [w for w in self._queue if w.message_id not in message_ids]


def _num_bytes(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())


def _examples(reply: Message) -> float | None:
    """Return the example count that a reply speaks of, in a metric or config record."""
    if not reply.has_content():
        return None
    content = reply.content
    counts: list[object] = [record.get(_COUNT) for record in content.metric_records.values()]
    counts += [record.get(_COUNT) for record in content.config_records.values()]
    return next((float(count) for count in counts if isinstance(count, int | float)), None)
