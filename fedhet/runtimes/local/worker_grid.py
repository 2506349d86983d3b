"""Flower's Grid over warm workers."""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedhet.common.flower.messages import ErrorCode, make_message
from fedhet.common.flower.task_identity import Run, empty_run, set_identity, set_message_id
from fedhet.runtimes.local.protocol import Answer, Federation, Lost, Place, Workers, WorkerTask
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold
from fedhet.strategies.wire.array_codec import bytes_of
from fedhet.strategies.wire.records import array_records

_INLINE_BYTES = 1 << 14  # a larger record is placed even if only one client gets it
_RESTART_SECONDS = 60.0
# An exchange with a worker takes about .0005 s. So a worker gets its whole part of a short round at
# once, and batches of work in a long one; the next batch is under way before it is needed.
_SHORT_SECONDS, _BATCH_SECONDS = 0.02, 0.005


@dataclass(frozen=True)
class _Waiting:
    """A message to deliver: its task, and its expected time relative to the others."""

    task: WorkerTask
    size: float
    alone: bool = False  # whether to send it alone: the worker of its batch was lost

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

    The workers add up the replies of a round that nobody needs singly (:meth:`send_and_fold`). If a
    worker dies, its part is lost, and its clients are asked once more.
    """

    def __init__(self, workers: Workers, federation: Federation) -> None:
        set_identity()
        self._workers = workers
        self._federation = federation
        self._run = empty_run()
        self._numbers = itertools.count(1)
        self._queue: list[_Waiting] = []  # longest last
        # by worker: its present batch and the next one
        self._given: dict[int, list[list[_Waiting]]] = {w: [] for w in range(len(workers))}
        self._seconds = math.inf  # per client, in the batch answered last
        self._rate = math.inf  # seconds per example, in the same batch
        self._batch_seconds = _BATCH_SECONDS  # the work that a batch may have
        self._replies: dict[str, Message] = {}
        # by worker: what it has folded, with the client's new state
        self._folded: dict[int, list[tuple[_Waiting, RecordDict]]] = {}
        self._examples: dict[int, float] = {}
        self._states: dict[int, RecordDict] = {}
        # the last round's sum: it lies where the workers will add up the next one
        self._lent: Callable[[], ReplyFold | None] = lambda: None

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
        return self._push(messages)

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

    def send_and_fold(
        self, messages: Mapping[int, Message], settings: FoldSettings, timeout: float | None = None
    ) -> ReplyFold:
        """Send a round's messages, by client id; return the replies, added up by the workers.

        After ``timeout`` seconds the grid gives up a client as in :meth:`send_and_receive`.
        """
        if (before := self._lent()) is not None and before.sum is not None:
            before.sum.keep()  # somebody may still read it
        total = ReplyFold(settings)
        self._lent = weakref.ref(total)
        waiting = set(self._push(messages.values(), settings))
        while waiting:
            deadline = None if timeout is None else time.monotonic() + timeout
            for message in self._receive(waiting, deadline):  # errors alone: replies are folded
                total.take(message.metadata.src_node_id - 1, message)
            waiting = self._under_way() or self._gather(total)
            if timeout is not None:  # a repeated message may wait until a new worker has started
                timeout = max(timeout, _RESTART_SECONDS)
        return total

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def _push(self, messages: Iterable[Message], settings: FoldSettings | None = None) -> list[str]:
        pushed = list(messages)
        if not self._queue and not any(self._given.values()):
            self._workers.forget()
        places = self._place_records(pushed)
        place = None if settings is None else self._workers.place(settings)
        new = [self._waiting(message, places, place) for message in pushed]
        self._queue = sorted([*self._queue, *reversed(new)], key=lambda waiting: waiting.size)
        share = sum(map(self._expected, self._queue)) / max(len(self._given), 1)
        self._batch_seconds = share if share <= _SHORT_SECONDS else _BATCH_SECONDS
        self._dispatch()
        return [waiting.message_id for waiting in new]

    def _under_way(self) -> set[str]:
        """Return the unanswered messages; those of lost workers may have been sent again."""
        given = itertools.chain.from_iterable(self._given.values())
        return {w.message_id for w in itertools.chain(self._queue, *given)}

    def _gather(self, total: ReplyFold) -> set[str]:
        """Take the idle workers' parts; return the messages whose replies were lost with one."""
        parts, lost = self._workers.collect(list(self._folded))
        for part in parts:  # a worker that folds once more writes where its part is
            total.merge(part, borrow=not lost)
        for worker, outcome in lost.items():
            self._take_back(worker, replaced=outcome.replaced)
        for folded in self._folded.values():
            self._states |= {waiting.node_id: state for waiting, state in folded if state}
        self._folded.clear()
        self._dispatch()
        return self._under_way()

    def _receive(self, message_ids: set[str], deadline: float | None) -> Iterator[Message]:
        while message_ids:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            folded = self._collect(left)
            here = sorted(message_ids & self._replies.keys(), key=int)
            message_ids.difference_update(here, folded)
            for message_id in here:
                yield self._replies.pop(message_id)
            if left == 0.0:
                self._give_up(message_ids)
                return

    def _place_records(self, messages: Sequence[Message]) -> dict[int, Place]:
        """Place all shared or large records; return their places by ``id``."""
        sent = [record for one in messages for record in array_records(one.content).values()]
        records, uses = {id(record): record for record in sent}, Counter(map(id, sent))
        return {
            key: self._workers.place(record)
            for key, record in records.items()
            if uses[key] > 1 or sum(map(bytes_of, record.values())) >= _INLINE_BYTES
        }

    def _waiting(
        self, message: Message, places: dict[int, Place], settings: Place | None
    ) -> _Waiting:
        node_id = message.metadata.dst_node_id
        if node_id not in self.get_node_ids():
            raise ValueError(f"node {node_id} is not one of 1..{self._federation.num_clients}")
        set_message_id(message, str(next(self._numbers)))
        content = message.content
        arrays = array_records(content).items()
        placed = {name: places[id(one)] for name, one in arrays if id(one) in places}
        rest = RecordDict({name: content[name] for name in content if name not in placed})
        bare = make_message(message.metadata, rest)
        state = self._states.get(node_id, RecordDict())
        size = self._examples.get(node_id, float("inf"))  # unknown ones first
        return _Waiting(
            WorkerTask(self._federation, bare, placed, list(content), state, settings), size
        )

    def _dispatch(self) -> None:
        if self._queue and not self._given:
            raise RuntimeError("all workers died, and no new one could be started")
        for depth in (0, 1):
            for worker, given in self._given.items():
                # A second batch saves the worker a wait for the server. The last tasks are not
                # given in advance: they go to the first free worker.
                if len(given) == depth and len(self._queue) > depth * len(self._given):
                    given.append(self._batch())
                    self._workers.send(worker, [waiting.task for waiting in given[-1]])

    def _batch(self) -> list[_Waiting]:
        """Take one task from the queue, or several short ones with small answers."""
        idle = sum(not given for given in self._given.values()) or len(self._given)
        most, batch = math.ceil(len(self._queue) / idle), [self._queue.pop()]
        left = self._batch_seconds - self._expected(batch[0])
        while len(batch) < most and _may_share(batch[-1]) and _may_share(self._queue[-1]):
            seconds = self._expected(self._queue[-1])
            if seconds > 2 * left:  # more than half of it would exceed the batch
                break
            left -= seconds
            batch.append(self._queue.pop())
        return batch

    def _expected(self, waiting: _Waiting) -> float:
        """Estimate the seconds that a task takes from the last ones."""
        known = math.isfinite(waiting.size) and math.isfinite(self._rate)
        return self._rate * waiting.size if known else self._seconds

    def _collect(self, timeout: float | None) -> list[str]:
        """Note the answers; return the messages whose replies the workers have folded."""
        if not any(self._given.values()):
            return []
        done, folded = [], list[str]()
        for worker, outcome in self._workers.wait(timeout):
            given = self._given[worker]
            done.append((worker, given.pop(0) if given else [], outcome))  # an idle one may die
            if isinstance(outcome, Lost):
                self._take_back(worker, replaced=outcome.replaced)
        self._dispatch()  # first, because an idle worker wastes a core
        for worker, batch, outcome in done:
            if isinstance(outcome, Lost):
                self._note_loss(batch, outcome)
            else:
                self._measure(outcome)
                for waiting, answer in zip(batch, outcome, strict=True):
                    self._note(worker, waiting, answer)
                    if answer.reply is None:
                        folded.append(waiting.message_id)
        self._dispatch()
        return folded

    def _measure(self, answers: Sequence[Answer]) -> None:
        """Note how long clients take."""
        self._seconds = max(fmean(answer.seconds for answer in answers), 1e-6)
        counted = [(one.seconds, one.num_examples) for one in answers if one.num_examples]
        if counted:
            self._rate = sum(s for s, _ in counted) / sum(n for _, n in counted)

    def _take_back(self, worker: int, *, replaced: bool) -> None:
        """Queue a dead worker's tasks again, and those whose replies it had folded."""
        self._queue += [waiting for waiting, _ in self._folded.pop(worker, ())]
        for batch in self._given.pop(worker):
            self._queue += [replace(waiting, alone=len(batch) > 1) for waiting in batch]
        if replaced:
            self._given[worker] = []

    def _note_loss(self, batch: Sequence[_Waiting], outcome: Lost) -> None:
        """Answer with an error for the client that the worker was lost with, if it is known."""
        if len(batch) != 1:  # then ask them one by one
            self._queue += [replace(waiting, alone=True) for waiting in batch]
            return
        error = Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=outcome.reason)
        self._replies[batch[0].message_id] = Message(error, reply_to=batch[0].task.message)

    def _note(self, worker: int, waiting: _Waiting, outcome: Answer) -> None:
        """Keep the outcome of a message."""
        if outcome.num_examples is not None:
            self._examples[waiting.node_id] = outcome.num_examples
        if outcome.reply is None:
            self._folded.setdefault(worker, []).append((waiting, outcome.state))
            return
        self._replies[waiting.message_id] = outcome.reply
        if outcome.state:
            self._states[waiting.node_id] = outcome.state

    def _give_up(self, message_ids: set[str]) -> None:
        for worker, given in list(self._given.items()):
            stuck = [w for w in given[0] if w.message_id in message_ids] if given else []
            if not stuck:
                continue
            names = ", ".join(str(waiting.node_id - 1) for waiting in stuck)
            reason = f"client {names} took too long"
            self._take_back(worker, replaced=self._workers.replace(worker, reason))
            if len(stuck) > 1:  # ask them once more, one by one
                message_ids.difference_update(waiting.message_id for waiting in stuck)
        self._queue = [w for w in self._queue if w.message_id not in message_ids]
        self._dispatch()


def _may_share(waiting: _Waiting) -> bool:
    """Return whether a task may be in a batch: its answer is small."""
    task = waiting.task
    query = task.message.metadata.message_type == MessageType.QUERY
    return (query or task.settings is not None) and not waiting.alone
