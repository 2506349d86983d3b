"""Faster polling for Flower's grids, which also outlast a busy SuperLink.

Flower looks for replies every 0.1 s in a simulation and every 3 s in a deployment, where a round
of one second would take three. A deployment's reply is announced before its arrays have arrived;
for an array that is missing Flower's ServerApp waits 1 s, 2 s, 4 s, ... (at most 10 s).

A SuperLink whose database is locked answers "500 Internal Server Error", or that it has not stored
an object, and with both Flower's own grid ends the run. The same request is good a moment later.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from threading import get_ident
from types import ModuleType
from typing import Any

from flwr.app import Message
from flwr.app.message import make_message
from flwr.serverapp import Grid

from fedhet.server_app.arriving_replies import ArrivingReplies
from fedhet.strategies.wire.packed_records import packed
from fedhet.strategies.wire.polling import give_up, pause
from fedhet.strategies.wire.records import may_answer

_SIMULATION_SECONDS = 0.02
_SERVER_ERROR = 500
_ERRORS_SECONDS = 300.0  # how long a SuperLink may answer one request with these
_REFUSALS_SECONDS, _PAUSE_SECONDS = 60.0, 1.0  # how long it may refuse an object; between tries
# Between two looks for an array, until Flower's own limit of two hours.
_ARRAY_SECONDS = {"initial_backoff": 0.1, "backoff_cap": 1.0, "max_tries_per_object": None}


@contextmanager
def fast_polling(grid: Grid) -> Iterator[None]:
    """Let a Grid of Flower's notice replies sooner, and none wait for another's arrays.

    What a deployment's grid sends is packed, and what it receives unpacked (packed_records.py).
    """
    if hasattr(grid, "pull_interval"):  # of a simulation
        grid.pull_interval = _SIMULATION_SECONDS
    elif type(grid).__module__.startswith("flwr."):
        grid.send_and_receive = partial(send_and_receive, grid)  # type: ignore[method-assign]
        _notice_arrays(sys.modules.get(type(grid).__module__))
        if hasattr(type(grid), "_runtime_client"):
            if (invoker := getattr(grid, "_retry_invoker", None)) is not None:
                _outlast_errors(invoker)
            _outlast_refusals(grid._runtime_client)  # type: ignore[attr-defined]
            grid.push_messages = partial(_push_packed, grid.push_messages)  # type: ignore[method-assign]
            replies = ArrivingReplies(grid)
            grid.pull_messages = replies.pull_messages  # type: ignore[method-assign]
            grid.give_up = replies.give_up  # type: ignore[attr-defined]
            with closing(replies):
                yield
            return
    yield


def _outlast_errors(invoker: Any) -> None:
    """Let a grid ask again for some minutes where its SuperLink answers with an error of its own.

    A message that the SuperLink has already is no error to it. A reply that it had marked as
    delivered before the error is lost: the round misses it at its timeout.
    """
    gives_up, on_success = invoker.should_giveup, invoker.on_success
    began: dict[int, float] = {}  # by thread: each makes one request at a time

    def should_giveup(error: Exception) -> bool:
        answer = getattr(error, "response", None)
        if answer is None or answer.status_code != _SERVER_ERROR:
            began.pop(get_ident(), None)
            return bool(gives_up(error))
        waited = time.monotonic() - began.setdefault(get_ident(), time.monotonic())
        if waited <= _ERRORS_SECONDS:
            return False
        del began[get_ident()]
        return True

    def succeeded(state: Any) -> None:
        began.pop(get_ident(), None)
        on_success(state)

    invoker.should_giveup, invoker.on_success = should_giveup, succeeded


def _outlast_refusals(client: Any) -> None:
    """Let a grid push an object again that its SuperLink has not stored.

    It answers so where its database is locked, and where the push is no longer awaited.
    """
    push = getattr(client, "PushObject", None)
    if push is None:  # another Flower's
        return

    def push_until_stored(request: Any) -> Any:
        began = time.monotonic()
        while not (answer := push(request)).stored:
            if time.monotonic() - began >= _REFUSALS_SECONDS:
                break
            time.sleep(_PAUSE_SECONDS)
        return answer

    client.PushObject = push_until_stored


def _push_packed(
    push: Callable[[Iterable[Message]], Iterable[str]], messages: Iterable[Message]
) -> Iterable[str]:
    """Push messages whose records are packed; the messages have the ids afterwards."""
    plain = list(messages)
    contents = packed(message.content for message in plain)
    pairs = zip(plain, contents, strict=True)
    return push([make_message(message.metadata, content) for message, content in pairs])


def _notice_arrays(module: ModuleType | None) -> None:
    """Let a grid's module notice the arrays of a reply sooner."""
    pull = getattr(module, "pull_objects", None)
    if pull is not None and not isinstance(pull, partial):
        vars(module)["pull_objects"] = partial(pull, **_ARRAY_SECONDS)


def send_and_receive(
    grid: Grid, messages: Iterable[Message], *, timeout: float | None = None
) -> Iterator[Message]:
    """Send messages; yield the replies within ``timeout`` seconds (None: all) as they arrive.

    So the server adds replies up while others are on their way.
    """
    sent = list(messages)
    taken = set(grid.push_messages(sent))
    about = [message.metadata for message in sent]
    waiting = {one.message_id: one.dst_node_id for one in about if one.message_id in taken}
    return _replies(grid, waiting, time.monotonic(), timeout)


def _replies(
    grid: Grid, waiting: dict[str, int], began: float, timeout: float | None
) -> Iterator[Message]:
    try:
        while waiting:
            new = list(grid.pull_messages(waiting))
            while new:
                asked = new[0].metadata.reply_to_message_id
                if asked in waiting and may_answer(new[0], waiting[asked]):
                    del waiting[asked]
                yield new.pop(0)  # freed as soon as it is added up
            waited = time.monotonic() - began
            if not waiting or (timeout is not None and waited >= timeout):
                break
            time.sleep(min(pause(waited), math.inf if timeout is None else timeout - waited))
    finally:
        give_up(grid, waiting)
