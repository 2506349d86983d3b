"""Asynchronous rounds of real clients: messages are pushed and pulled, and nobody is waited for.

M clients train at any time. An idle client gets the server's current model, version v (the model
after step v). Whoever answers frees a place, and the next client takes it at once. The server takes
step t as soon as K different clients have answered validly since step t - 1. Further replies that
are there by then count for step t + 1, one step staler.

- A client answers, fails or is given up at most once in a step, and does not start again in it.
- A reply has ``timeout-seconds`` from its message on. After that the server stops looking for it.
- A client whose node is not connected keeps nobody from starting; if it answers in time, it counts.
- If no connected client trains or can start, the server takes the step with fewer than K replies;
  with none the step has failed, and the next one waits for clients to connect.
- Only replies to messages of this process count. A resumed run asks everybody anew: replies in
  flight are lost, and leave no trace in a client's state (wire/client_versions.py).

Replies arrive in no fixed order, so two runs differ. If they arrive in the order of a simulated
system, the result is SimulatedClients', to the bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message

from fedhet.strategies.base import Tensors
from fedhet.strategies.modes.asynchronous import (
    STARTS,
    Arrival,
    Asynchronous,
    collect,
    idle_clients,
)
from fedhet.strategies.round.reply_fold import ReplyFold
from fedhet.strategies.round.selection import Arrived, Outcome, RoundStart, Selection, Selector
from fedhet.strategies.slots import ClientSampler
from fedhet.strategies.wire.array_codec import to_tensor
from fedhet.strategies.wire.messages import timeout_of
from fedhet.strategies.wire.records import (
    UNASKED,
    count_bytes,
    give_up,
    may_answer,
    no_reply,
    pause,
)

_LOOK_SECONDS = 5.0  # after which it is looked up again who is connected


@dataclass(frozen=True)
class Sent:
    """A message that is not answered yet."""

    message_id: str
    node: int
    version: int
    deadline: float  # on the monotonic clock


@dataclass
class LiveClients(Selector):
    """Starts real clients and takes their replies as they arrive."""

    settings: Asynchronous  # K, s(tau), and which replies are too old
    sampler: ClientSampler  # its number of clients of a round is M, how many train at any time
    buffers: Collection[str] = ()  # names of the tensors that are not trained
    in_flight: dict[int, Sent] = field(default_factory=dict)  # the clients that train, by id
    # the buffers (FedAsync's x_v, too) that clients in flight, or about to start, got
    models: dict[int, Tensors] = field(default_factory=dict)
    arrived: deque[Message] = field(default_factory=deque)  # replies beyond K, for the next step
    # ids of messages whose replies nobody waits for
    forgotten: list[str] = field(default_factory=list)
    sleep: Callable[[float], None] = time.sleep

    def check(self, num_clients: int, least: int) -> None:
        """Refuse steps of too many or too few replies."""
        self.settings.check(num_clients, least)

    def select(self, start: RoundStart) -> Selection:
        """Return who may answer in step t, from which version, and with which weight."""
        before = start.number - 1
        versions = dict.fromkeys(sorted(start.availability.registry.nodes), before)
        versions |= {client: sent.version for client, sent in sorted(self.in_flight.items())}
        needed = {sent.version for sent in self.in_flight.values()}
        self.models = {v: model for v, model in self.models.items() if v in needed}
        self.models[before] = self._read_later(start.arrays)
        arriving = LiveStep(self, start, versions).collect
        nobody = Outcome([])
        return self.settings.selection(
            start.number, versions, self.models, nobody, start.clock, {}, arriving
        )

    def forget(self) -> None:
        """Give up the clients that train, see SimulatedClients; leave their replies."""
        self.forgotten += [sent.message_id for sent in self.in_flight.values()]
        self.in_flight.clear()
        self.arrived.clear()

    def _read_later(self, arrays: ArrayRecord) -> Tensors:
        """Return the buffers, and for FedAsync x: what :class:`Started` reads."""
        needed = arrays.keys() if self.settings.towards_model else arrays.keys() & self.buffers
        return {name: to_tensor(arrays[name]) for name in needed}


@dataclass
class LiveStep:
    """Step t in progress."""

    clients: LiveClients
    start: RoundStart
    versions: Mapping[int, int]  # of all that may answer
    through: set[int] = field(default_factory=set)  # do not start again in this step
    bytes_down: int = 0

    def collect(self, fold: ReplyFold) -> Arrived:
        """Take replies until the step can be taken."""
        clients, number = self.clients, self.start.number
        give_up(self.start.grid, clients.forgotten)
        clients.forgotten.clear()

        def take(arrival: Arrival) -> bool:
            assert arrival.reply is not None
            fold.take(arrival.client, arrival.reply)
            return arrival.client not in fold.refused

        found = collect(self.arrivals(fold.unasked), clients.settings, number, take)
        fold.refused |= found.lost
        staleness = [
            number - 1 - version
            for client, version in sorted(found.versions.items())
            if client not in fold.refused
        ]
        return Arrived(sorted(found.versions), sorted(found.late), staleness, self.bytes_down)

    def arrivals(self, unasked: list[str]) -> Iterator[Arrival]:
        """Yield the replies as they arrive, and start other clients in their place.

        ``unasked`` gets other messages.
        """
        clients, rng = self.clients, self._rng()
        while True:
            yield from self._start(rng)
            if not self._connected_in_flight() and not clients.arrived:
                return
            yield from self._given_up()
            if not clients.arrived:
                continue  # somebody was given up, came or went
            reply = clients.arrived.popleft()
            client = self._client_of(reply)
            if client is None:
                unasked.append(f"node {reply.metadata.src_node_id}: {UNASKED}")
                continue
            self.through.add(client)
            yield Arrival(client, clients.in_flight.pop(client).version, reply)

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng([STARTS, self.clients.settings.seed, self.start.number])

    def _start(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Start clients until M of the connected ones train; yield those that cannot start."""
        start, clients = self.start, self.clients
        availability = start.availability
        if not availability.trainers:
            return
        at_once = len(clients.sampler.sample(start.number, len(availability.trainers)))
        present = [client for client in availability.trainers if client in self.versions]
        idle = idle_clients(present, {*clients.in_flight, *self.through})
        size = min(at_once - self._connected_in_flight(), len(idle))
        drawn = rng.choice(len(idle), size=max(0, size), replace=False)
        chosen = [idle[i] for i in sorted(drawn.tolist())]
        for client, message in start.write(chosen).items():
            self.bytes_down += count_bytes(message.content)
            pushed = [one for one in start.grid.push_messages([message]) if one]
            if not pushed:
                self.through.add(client)
                why = "its message was not taken by the SuperLink"
                yield Arrival(client, start.number - 1, lost=why)
                continue
            deadline = time.monotonic() + timeout_of(start.config)
            node = message.metadata.dst_node_id
            clients.in_flight[client] = Sent(pushed[0], node, start.number - 1, deadline)

    def _given_up(self) -> Iterator[Arrival]:
        """Wait until a reply is there, or the clients in flight have or may have changed.

        Yields the clients whose time is over.
        """
        clients, grid, began = self.clients, self.start.grid, time.monotonic()
        timeout = timeout_of(self.start.config)
        while not clients.arrived:
            ids = [sent.message_id for sent in clients.in_flight.values()]
            clients.arrived.extend(grid.pull_messages(ids))
            if clients.arrived:
                return
            now = time.monotonic()
            silent = [c for c, sent in clients.in_flight.items() if sent.deadline <= now]
            for client in silent:
                sent = clients.in_flight.pop(client)
                give_up(grid, [sent.message_id])
                self.through.add(client)
                yield Arrival(client, sent.version, lost=no_reply(timeout))
            if silent:
                return
            if now - began > _LOOK_SECONDS:
                self.start.availability.look_up(grid)
                return
            clients.sleep(pause(now - began))

    def _client_of(self, reply: Message) -> int | None:
        """Return whose reply it is; None if it answers no open message."""
        asked = reply.metadata.reply_to_message_id
        for client, sent in self.clients.in_flight.items():
            if sent.message_id == asked and may_answer(reply, sent.node):
                return client
        return None

    def _connected_in_flight(self) -> int:
        absent = self.start.availability.absent
        return sum(client not in absent for client in self.clients.in_flight)
