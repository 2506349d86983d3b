"""Asynchronous rounds of real clients: messages are pushed and pulled, and nobody is waited for.

M clients train at any time. A client that is idle gets the server's model of that moment, version v
(the model after step v); whoever answers frees a place, which the next one takes at once. Step t is
taken as soon as K different clients have answered validly since step t - 1. Replies that are there
by then but beyond K count for step t + 1, one step staler.

- A client answers, fails or is given up once in a step; who is through does not start again in it.
- A reply has ``timeout-seconds`` from its message on. After that it is not looked for any more.
- A client whose node is not connected keeps nobody from starting; if it answers in time, it counts.
- The step is taken with fewer than K replies where no connected client trains, or can start;
  without any it has failed, and the next one waits for clients to connect.
- Only replies to messages of this process are taken. A run that is resumed asks everybody anew:
  what was in flight is lost, and leaves no trace in a client's state (wire/client_versions.py).

The order of arrival is that of the real world, so two runs differ. Where replies arrive in the
order of a simulated system, the result is that of :class:`~.asynchronous.SimulatedClients`, to the
bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message

from fedhet.strategies.base import ReplySum, Tensors
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.simulated_clients import STARTS, Started, idle_clients
from fedhet.strategies.modes.systems import SimulatedRound
from fedhet.strategies.round.chosen import Chosen
from fedhet.strategies.round.cohort import Exchange
from fedhet.strategies.round.reply_fold import ReplyFold
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.slots import ClientSampler
from fedhet.strategies.wire.array_codec import to_tensor
from fedhet.strategies.wire.messages import timeout_of
from fedhet.strategies.wire.polling import give_up, pause
from fedhet.strategies.wire.records import count_bytes, no_reply

_LOOK_SECONDS = 5.0  # after which it is looked up again who is connected


@dataclass(frozen=True)
class Sent:
    """A message that is not answered yet."""

    message_id: str
    node: int
    version: int
    deadline: float  # on the monotonic clock


@dataclass
class LiveClients:
    """Starts real clients and takes their replies as they arrive.

    Attributes:
        settings: K, s(tau), and what is too old.
        sampler: its number of clients of a round is M, how many train at any time.
        in_flight: the clients that train, by id.
        buffers: names of the tensors that are not trained.
        models: the buffers (FedAsync's x_v, too) that clients in flight, or about to start, got.
        arrived: replies beyond K, for the next step.
        forgotten: ids of messages whose replies are not waited for any more.
    """

    settings: Asynchronous
    sampler: ClientSampler
    buffers: Collection[str] = ()
    in_flight: dict[int, Sent] = field(default_factory=dict)
    models: dict[int, Tensors] = field(default_factory=dict)
    arrived: deque[Message] = field(default_factory=deque)
    forgotten: list[str] = field(default_factory=list)
    sleep: Callable[[float], None] = time.sleep

    def choose(self, exchange: Exchange, step: int, clock: float, arrays: ArrayRecord) -> Chosen:
        """Return who may answer in step t, from which version, and what the reply then weighs.

        Args:
            exchange: with whom, and how messages are written.
            step: t; who starts meanwhile gets version t - 1.
            clock: not used: there is no simulated time.
            arrays: x, version t - 1.
        """
        before = step - 1
        versions = dict.fromkeys(sorted(exchange.availability.registry.nodes), before)
        versions |= {client: sent.version for client, sent in sorted(self.in_flight.items())}
        discounts = {client: self.settings.weight(before - v) for client, v in versions.items()}
        needed = {sent.version for sent in self.in_flight.values()}
        self.models = {v: model for v, model in self.models.items() if v in needed}
        self.models[before] = self._kept(arrays)
        towards_model = self.settings.towards_model

        def rebase(total: ReplySum, tensors: Tensors) -> ReplySum:
            started = Started(versions, discounts, self.models, towards_model)
            return started.rebase(total, tensors)

        return Chosen(
            {},
            SimulatedRound([], [], [], 0.0),
            clock,
            versions,
            discounts,
            rebase,
            LiveStep(self, exchange, step, arrays, versions),
        )

    def forget(self) -> None:
        """Give up who is in flight, see SimulatedClients; their replies are not looked for."""
        self.forgotten += [sent.message_id for sent in self.in_flight.values()]
        self.in_flight.clear()
        self.arrived.clear()

    def _kept(self, arrays: ArrayRecord) -> Tensors:
        """Return the buffers, and for FedAsync x: what :class:`Started` reads."""
        needed = arrays.keys() if self.settings.towards_model else arrays.keys() & self.buffers
        return {name: to_tensor(arrays[name]) for name in needed}


@dataclass
class LiveStep:
    """Step t in progress."""

    clients: LiveClients
    exchange: Exchange
    step: int
    arrays: ArrayRecord
    versions: Mapping[int, int]  # of all that may answer
    through: set[int] = field(default_factory=set)  # do not start again in this step

    def collect(self, fold: ReplyFold, report: RoundReport) -> Collection[int]:
        """Take replies until the step can be taken; return the clients whose replies were taken."""
        settings, taken, late = self.clients.settings, dict[int, int](), list[int]()
        rng = np.random.default_rng([STARTS, settings.seed, self.step])
        report.bytes_down = 0
        give_up(self.exchange.grid, self.clients.forgotten)
        self.clients.forgotten.clear()
        while len(fold.replies) < settings.buffer:
            report.bytes_down += self._start(rng, fold)
            if not self._connected_in_flight() and not self.clients.arrived:
                break
            reply = self._next(fold)
            if reply is None:
                continue  # somebody was given up, came or went
            client = self._client_of(reply, fold)
            if client is None:
                continue
            sent = self.clients.in_flight.pop(client)
            self.through.add(client)
            if settings.too_old(self.step - 1 - sent.version):
                late.append(client)
            else:
                taken[client] = sent.version
                fold.take(client, reply)
        valid = {reply.client_id for reply in fold.replies}
        report.late = sorted(late)
        report.staleness = [self.step - 1 - v for c, v in sorted(taken.items()) if c in valid]
        return sorted(taken)

    def _start(self, rng: np.random.Generator, fold: ReplyFold) -> int:
        """Start clients until M of the connected ones train; return the bytes sent."""
        availability, clients = self.exchange.availability, self.clients
        if not availability.present:
            return 0
        at_once = len(clients.sampler.sample(self.step, len(availability.present)))
        present = [client for client in availability.present if client in self.versions]
        idle = idle_clients(present, {*clients.in_flight, *self.through})
        size = min(at_once - self._connected_in_flight(), len(idle))
        drawn = rng.choice(len(idle), size=max(0, size), replace=False)
        num_bytes = 0
        chosen = [idle[i] for i in sorted(drawn.tolist())]
        for client, message in self.exchange.write(self.step, self.arrays, chosen).items():
            num_bytes += count_bytes(message.content)
            pushed = [one for one in self.exchange.grid.push_messages([message]) if one]
            if not pushed:
                self._give_up(client, "its message was not taken by the SuperLink", fold)
                continue
            deadline = time.monotonic() + timeout_of(self.exchange.config)
            node = message.metadata.dst_node_id
            clients.in_flight[client] = Sent(pushed[0], node, self.step - 1, deadline)
        return num_bytes

    def _next(self, fold: ReplyFold) -> Message | None:
        """Return the next reply; None if the clients in flight have changed, or may have."""
        clients, grid, began = self.clients, self.exchange.grid, time.monotonic()
        while not clients.arrived:
            ids = [sent.message_id for sent in clients.in_flight.values()]
            clients.arrived.extend(grid.pull_messages(ids))
            if clients.arrived:
                break
            now, timeout = time.monotonic(), timeout_of(self.exchange.config)
            silent = [c for c, sent in clients.in_flight.items() if sent.deadline <= now]
            for client in silent:
                give_up(grid, [clients.in_flight.pop(client).message_id])
                self._give_up(client, no_reply(timeout), fold)
            if silent:
                return None
            if now - began > _LOOK_SECONDS:
                self.exchange.availability.look_up(grid)
                return None
            clients.sleep(pause(now - began))
        return clients.arrived.popleft()

    def _client_of(self, reply: Message, fold: ReplyFold) -> int | None:
        """Return whose reply it is; None, and say so, if it answers nothing that is waited for."""
        asked, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        for client, sent in self.clients.in_flight.items():
            # the SuperLink's own errors do not name the node
            if sent.message_id == asked and (reply.has_error() or sent.node == node):
                return client
        fold.unasked.append(
            f"node {node}: its reply answers no message that is waited for (it came too late, or "
            "from before the run was resumed)"
        )
        return None

    def _give_up(self, client: int, why: str, fold: ReplyFold) -> None:
        self.through.add(client)
        fold.refused[client] = why

    def _connected_in_flight(self) -> int:
        absent = self.exchange.availability.absent
        return sum(client not in absent for client in self.clients.in_flight)
