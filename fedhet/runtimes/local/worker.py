"""A worker: acts as any client of the federation, one message at a time."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from logging import ERROR
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedhet.common.flower.messages import ErrorCode
from fedhet.common.flower.task_identity import set_identity
from fedhet.runtimes.local.protocol import Answer, Place, WorkerTask
from fedhet.runtimes.local.shared_memory import SharedSums
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold

_COUNT = "num-examples"


class ClientWorker:
    """Runs the ClientApp on a task's message, as a SuperNode would; ``fetch`` reads a placed value.

    It adds up a round's replies that nobody needs singly, so they never leave the process. The sums
    are in ``sums``, where the server reads them; None: in this process.
    """

    def __init__(self, fetch: Callable[[Place], Any], sums: SharedSums | None = None) -> None:
        self._fetch, self._sums = fetch, sums
        self._records: dict[Place, ArrayRecord] = {}
        self._fold: ReplyFold | None = None
        set_identity()

    def handle(self, tasks: Sequence[WorkerTask]) -> list[Answer]:
        """Answer tasks, one after the other."""
        return [self._handle(task) for task in tasks]

    def _handle(self, task: WorkerTask) -> Answer:
        """Answer with the client's reply, or an error reply if the ClientApp raises."""
        began = time.perf_counter()
        self._records = {  # keeps the last task's: most clients get the same
            place: self._records.get(place) or self._fetch(place) for place in task.placed.values()
        }
        message, placed = task.message, task.placed
        content = {
            name: self._records[placed[name]] if name in placed else message.content[name]
            for name in task.names
        }
        message.content = RecordDict(content)
        node_id, federation = message.metadata.dst_node_id, task.federation
        context = Context(
            run_id=message.metadata.run_id,
            node_id=node_id,
            node_config={"partition-id": node_id - 1, "num-partitions": federation.num_clients},
            state=task.state,
            run_config=dict(federation.run_config),
        )
        try:
            reply = load_app(federation.app)(message, context)
        except Exception as error:
            log(ERROR, "client %s: %s", node_id - 1, traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reply = Message(Error(code=code, reason=reason), reply_to=message)
        examples = reported_examples(reply)
        if task.settings is not None:
            if self._fold is None:
                self._fold = self._new_fold(self._fetch(task.settings))
            self._fold.take(node_id - 1, reply)
        sent = reply if task.settings is None else None
        return Answer(sent, context.state, examples, time.perf_counter() - began)

    def _new_fold(self, settings: FoldSettings) -> ReplyFold:
        if self._sums is None:
            return ReplyFold(settings)
        self._sums.forget()  # the server has added them to its own
        return ReplyFold(settings, empty=self._sums.empty)

    def collect(self) -> ReplyFold:
        """Return the fold of the replies since the last call; there is at least one."""
        fold, self._fold = self._fold, None
        assert fold is not None
        return fold


def reported_examples(reply: Message) -> float | None:
    """Return the number of examples that a reply reports in a metric or config record."""
    content = reply.content if reply.has_content() else RecordDict()
    records = [record for record in content.values() if not isinstance(record, ArrayRecord)]
    records.sort(key=lambda record: isinstance(record, ConfigRecord))
    counts: list[object] = [record.get(_COUNT) for record in records]
    return next((float(count) for count in counts if isinstance(count, int | float)), None)


def load_app(reference: str) -> ClientApp:
    """Return the ClientApp that "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{reference} is a {type(app).__name__}, not a ClientApp")
    return app
