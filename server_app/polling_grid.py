"""Faster polling for Flower's grids, which also outlast a busy SuperLink.

In a deployment Flower looks for replies every 3 s, so a round of one second would take three. A
reply is announced before its arrays have arrived. What of Flower is changed for this:
common/flower/grid_polling.py and arriving_replies.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from logging import INFO

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedhet.common.flower import grid_polling
from fedhet.common.flower.arriving_replies import ArrivingReplies
from fedhet.common.flower.messages import make_message
from fedhet.strategies.wire.packed_records import packed, unpacked
from fedhet.strategies.wire.records import give_up, may_answer, pause

_REPORT_SECONDS = 60.0  # until the log says who is waited for; then twice as long, and so on
_NAMED = 20  # nodes in that line


@contextmanager
def fast_polling(grid: Grid) -> Iterator[None]:
    """Let a Grid of Flower's notice replies sooner, without waiting for another's arrays.

    What a deployment's grid sends is packed, and what it receives unpacked (packed_records.py).
    """
    if grid_polling.is_simulated(grid):
        grid_polling.poll_simulation_often(grid)
    elif grid_polling.is_flowers(grid):
        grid.send_and_receive = partial(send_and_receive, grid)  # type: ignore[method-assign]
        grid_polling.notice_arrays(grid)
        if grid_polling.is_deployed(grid):
            grid_polling.outlast_errors(grid)
            grid_polling.outlast_refusals(grid)
            grid.push_messages = partial(_push_packed, grid.push_messages)  # type: ignore[method-assign]
            replies = ArrivingReplies(grid, unpacked)
            grid.pull_messages = replies.pull_messages  # type: ignore[method-assign]
            grid.give_up = replies.give_up  # type: ignore[attr-defined]
            with closing(replies):
                yield
            return
    yield


def _push_packed(
    push: Callable[[Iterable[Message]], Iterable[str]], messages: Iterable[Message]
) -> Iterable[str]:
    """Push messages whose records are packed; the messages have the ids afterwards."""
    plain = list(messages)
    contents = packed(message.content for message in plain)
    pairs = zip(plain, contents, strict=True)
    return push([make_message(message.metadata, content) for message, content in pairs])


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
    asked, report = len(waiting), _REPORT_SECONDS
    try:
        while waiting:
            new = list(grid.pull_messages(waiting))
            while new:
                answered = new[0].metadata.reply_to_message_id
                if answered in waiting and may_answer(new[0], waiting[answered]):
                    del waiting[answered]
                yield new.pop(0)  # freed as soon as it is added up
            waited = time.monotonic() - began
            if not waiting or (timeout is not None and waited >= timeout):
                break
            if waited >= report:
                silent = len(waiting), asked, sorted(waiting.values())[:_NAMED]
                log(INFO, "After %.0f s, %s of %s nodes have not replied: %s", waited, *silent)
                report *= 2
            time.sleep(min(pause(waited), math.inf if timeout is None else timeout - waited))
    finally:
        give_up(grid, waiting)
