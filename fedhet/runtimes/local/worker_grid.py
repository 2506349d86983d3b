"""Flower's Grid over warm workers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedhet.runtimes.local.protocol import Answer, Federation, Lost, Place, Task, Workers
from fedhet.runtimes.local.worker import set_identity

_INLINE_BYTES = 1 << 14  # a larger record is placed even if only one client gets it
_COUNT = "num-examples"


@dataclass(frozen=True)
class _Waiting:
    """A pushed message: its task, and its expected time relative to the others."""

    task: Task
    size: float

    @property
    def message_id(self) -> str:
        return str(self.task.message.metadata.message_id)

    @property
    def node_id(self) -> int:
        return int(self.task.message.metadata.dst_node_id)


class WorkerGrid(Grid):
    """Delivers messages to workers that act as the clients.

    A record that several messages share, such as the global model, is placed once for all workers.
    Clients with more examples go first, so that no long task is left for the end. The grid keeps
    each client's ``Context.state`` and sends it with the client's next message.
    """

    def __init__(self, workers: Workers, federation: Federation) -> None:
        set_identity()
        self._workers = workers
        self._federation = federation
        self._run = Run.create_empty(run_id=1)
        self._numbers = itertools.count(1)
        self._queue: list[_Waiting] = []  # longest last
        # by worker: its present task and the next one
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
        """Give messages to the workers; return their ids."""
        pushed = list(messages)
        if not self._queue and not any(self._given.values()):
            self._workers.forget()
        places = self._place_records(pushed)
        new = [self._waiting(message, places) for message in pushed]
        self._queue = sorted([*self._queue, *reversed(new)], key=lambda waiting: waiting.size)
        self._dispatch()
        return [waiting.message_id for waiting in new]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that have arrived."""
        self._collect(timeout=0.0)
        here = [message_id for message_id in message_ids if message_id in self._replies]
        return [self._replies.pop(message_id) for message_id in here]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and yield the replies as they arrive.

        After ``timeout`` seconds the workers of the missing replies are replaced: a client that
        continued to train would take a core from the next round.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._receive(set(self.push_messages(messages)), deadline)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

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
        """Place all records that are shared or large; return their places by ``id``."""
        sent = [record for one in messages for record in one.content.array_records.values()]
        records, uses = {id(record): record for record in sent}, Counter(map(id, sent))
        return {
            key: self._workers.place(record)
            for key, record in records.items()
            if uses[key] > 1 or sum(len(a.data) for a in record.values()) >= _INLINE_BYTES
        }

    def _waiting(self, message: Message, places: dict[int, Place]) -> _Waiting:
        node_id = message.metadata.dst_node_id
        if node_id not in self.get_node_ids():
            raise ValueError(f"node {node_id} is not one of 1..{self._federation.num_clients}")
        message.metadata.__dict__["_message_id"] = str(next(self._numbers))  # as Flower's grids do
        content = message.content
        arrays = content.array_records.items()
        placed = {name: places[id(one)] for name, one in arrays if id(one) in places}
        rest = RecordDict({name: content[name] for name in content if name not in placed})
        bare = Message(metadata=message.metadata, content=rest)  # type: ignore[call-overload]
        state = self._states.get(node_id, RecordDict())
        size = self._examples.get(node_id, float("inf"))  # unknown ones first
        return _Waiting(Task(self._federation, bare, placed, list(content), state), size)

    def _dispatch(self) -> None:
        if self._queue and not self._given:
            raise RuntimeError("all workers died, and no other could be started")
        for depth in (0, 1):
            for worker, given in self._given.items():
                # A second task saves the worker a wait for the server. The last tasks are not
                # given ahead: they go to the first free worker.
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
        self._dispatch()  # first of all: an idle worker wastes a core
        for waiting, outcome in done:
            self._replies[waiting.message_id] = self._reply(waiting, outcome)

    def _take_back(self, worker: int, *, replaced: bool) -> None:
        """Queue a dead worker's tasks again."""
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


def _examples(reply: Message) -> float | None:
    """Return the number of examples that a reply reports in a metric or config record."""
    content = reply.content if reply.has_content() else RecordDict()
    counts: list[object] = [record.get(_COUNT) for record in content.metric_records.values()]
    counts += [record.get(_COUNT) for record in content.config_records.values()]
    return next((float(count) for count in counts if isinstance(count, int | float)), None)
