"""Grids that notice replies soon.

Flower's own look for replies every .1 s in a simulation, and every three seconds in a deployment,
where a round of one second would take three.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.supercore.run import Run

_SIMULATION_SECONDS = 0.02
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 3.0
_SHARE = 0.05  # of the time waited so far: a pause makes no round longer by more


class FastPollingGrid(Grid):
    """Another Grid, with its own way to wait.

    Args:
        grid: pushes and pulls.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Return the run."""
        return self._grid.run

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
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return those replies to messages with these ids that are there."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return their replies; those that have come, after ``timeout`` seconds.

        Args:
            messages: to send.
            timeout: None waits for all.
        """
        waiting = set(self._grid.push_messages(messages))
        del messages  # with them the arrays that nobody needs any more
        replies: list[Message] = []
        began = time.monotonic()
        while waiting:
            new = list(self._grid.pull_messages(waiting))
            replies += new
            waiting -= {reply.metadata.reply_to_message_id for reply in new}
            waited = time.monotonic() - began
            if not waiting or (timeout is not None and waited >= timeout):
                break
            pause = min(max(_SHARE * waited, _SHORTEST_SECONDS), _LONGEST_SECONDS)
            time.sleep(pause if timeout is None else min(pause, timeout - waited))
        return replies


def with_fast_polling(grid: Grid) -> Grid:
    """Return a Grid of Flower's that notices replies sooner; any other as it is."""
    if hasattr(grid, "pull_interval"):  # the simulation's
        grid.pull_interval = _SIMULATION_SECONDS
        return grid
    return FastPollingGrid(grid) if type(grid).__module__.startswith("flwr.") else grid
