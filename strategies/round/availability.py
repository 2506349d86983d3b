"""Which of the registered clients are connected before each round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from logging import INFO, WARNING

from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.registration import (
    ClientRegistry,
    FederationConfig,
    ask,
    node_info,
    question,
    warn_of_untrainable,
)
from fedhet.strategies.wire.records import UNASKED, matched

_WAIT_POLL_SECONDS = 1.0  # for clients to come back before a round


class ClientAvailability:
    """Tracks which of the registered clients are connected, and adds late joiners to them.

    A late joiner plays a client that is missing, or whose node is gone. Rounds do not wait for its
    answer.
    """

    def __init__(self, registry: ClientRegistry, federation: FederationConfig) -> None:
        self.registry, self._federation = registry, federation
        self.held_back: frozenset[int] = frozenset()  # the rounds do without them
        self._gone: frozenset[int] = frozenset()
        self._asked: dict[int, Message] = {}  # the questions, by late node
        self._refused: set[int] = set()

    @property
    def absent(self) -> frozenset[int]:
        """The clients that were not connected at the last refresh, or are held back."""
        return self._gone | self.held_back

    @property
    def present(self) -> Sequence[int]:
        """The clients that were connected at the last refresh, and are not held back, in order."""
        size = len(self.registry)
        if not self.absent and len(self.registry.nodes) == size:
            return range(size)
        return sorted(self.registry.nodes.keys() - self.absent)

    @property
    def all_trainers(self) -> Sequence[int]:
        """The clients that may train, connected or not, in order."""
        unseen, clients = self._federation.unseen, range(len(self.registry))
        return [client for client in clients if client not in unseen] if unseen else clients

    @property
    def trainers(self) -> Sequence[int]:
        """The present clients that may train, in order."""
        unseen = self._federation.unseen
        if not unseen:
            return self.present
        return [client for client in self.present if client not in unseen]

    def ask(self, grid: Grid, clients: Sequence[int]) -> list[int]:
        """Ask the clients that were not asked yet; return the clients that can take part.

        Logs why the others cannot.
        """
        nodes, known = self.registry.nodes, self.registry.num_examples
        if new := [nodes[client] for client in clients if client not in known]:
            refused: dict[int, str] = {}
            infos = ask(grid, new, self._federation, refused, MessageType.QUERY)
            for node, info in infos.items():
                self.registry.add(node, info, node.__eq__)
            warn_of_untrainable(infos.values())
        return [client for client in clients if client in known]

    def refresh(self, grid: Grid, least: int = 1) -> None:
        """Look up which clients are connected; wait while they are fewer than are needed.

        ``least`` is what the method needs; ``min_replies`` may be more.

        Raises:
            TimeoutError: if they are too few for longer than the timeout.
        """
        size = len(self.registry) - len(self._federation.unseen)
        timeout = self._federation.connect_timeout_seconds
        asked, end = self._federation.min_replies, time.monotonic() + timeout
        needs = "strategy.aggregator or secure aggregation needs"
        why = f"min_replies={asked}" if asked >= least else f"{needs} {least} clients"
        least = min(max(asked, least), size)
        while (present := self.look_up(grid)) < least:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{why}, but only {present} of {size} clients are connected "
                    f"after {timeout:.0f} s (runtime.connect_timeout_seconds)"
                )
            time.sleep(_WAIT_POLL_SECONDS)

    def look_up(self, grid: Grid) -> int:
        """Register late joiners, log who left or came back.

        Return how many that may train are connected.
        """
        nodes = grid.get_node_ids()
        if isinstance(nodes, range) and len(nodes) == len(self.registry.nodes):
            return len(self.trainers)  # a simulation: nobody comes or goes
        connected = set(nodes)
        self._admit(grid, connected)
        nodes, clients = self.registry.nodes, range(len(self.registry))
        gone = frozenset(client for client in clients if nodes.get(client) not in connected)
        if gone != self._gone:
            log(WARNING, "clients that are not connected: %s", sorted(gone) or "none")
        self._gone = gone
        return len(self.trainers)

    def _admit(self, grid: Grid, connected: set[int]) -> None:
        """Ask the new ones of the connected nodes, and register or refuse those that answered."""
        self._asked = {node: asked for node, asked in self._asked.items() if node in connected}
        self._refused &= connected  # a node that reconnects is asked again
        known = {*self.registry.nodes.values(), *self._asked, *self._refused}
        if new := sorted(connected - known):
            questions = {node: question(node, self._federation) for node in new}
            taken = set(grid.push_messages(list(questions.values())))
            self._asked |= {
                node: one for node, one in questions.items() if one.metadata.message_id in taken
            }
        if not self._asked:
            return
        ids = [asked.metadata.message_id for asked in self._asked.values()]
        for node, answer in matched(grid.pull_messages(ids), dict(self._asked)):
            if node is None:
                log(WARNING, "node %s: %s", answer.metadata.src_node_id, UNASKED)
                continue
            del self._asked[node]
            try:
                info = node_info(node, answer, self._federation)
                client = self.registry.add(node, info, lambda other: other not in connected)
                log(INFO, "client %s has joined: node %s", client, node)
                warn_of_untrainable([info])
            except RefusedReplyError as refusal:
                self._refused.add(node)
                log(WARNING, "refused a node that joined late: %s", refusal)
