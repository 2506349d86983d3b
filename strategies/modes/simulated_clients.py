"""Asynchronous rounds on a simulated clock: who finishes next, and from which model they started.

Client i starts with the server's model at that time, version v (the model after step v), and
finishes when its system says. Step t takes the next K finishers. fedhet trains them only now, each
from its own version, which it keeps as long as somebody needs it. The result is the same as if the
clients ran side by side, and the same on every runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Payloads, Tensors
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.modes.asynchronous import (
    STARTS,
    Arrival,
    Asynchronous,
    collect,
    idle_clients,
)
from fedhet.strategies.modes.systems import ClientSystem, work_of
from fedhet.strategies.round.selection import Outcome, RoundStart, Selection, Selector
from fedhet.strategies.slots import ClientSampler
from fedhet.strategies.wire.records import to_record, to_tensors

_FEW, _TRIES = 1000, 100  # clients that are listed; draws before more are listed, too
_MODEL = "params"
_PREFIX = "asynchronous/"


@dataclass(frozen=True)
class Version:
    """What clients got that started after step v: x_v with its buffers, and the payloads."""

    params: Tensors
    payloads: Payloads


@dataclass(frozen=True)
class InFlight:
    """A client that trains: from which version, and when it finishes."""

    version: int
    finishes: float  # simulated seconds


@dataclass
class SimulatedClients(Selector):
    """Selects the clients of every step."""

    settings: Asynchronous  # K, s(tau), and what is too old
    sampler: ClientSampler  # its number of clients of a round is M, how many train at any time
    system: ClientSystem  # how long each client takes, and who drops out
    options: LocalTrainingConfig | None  # of local training, which say how long it is
    in_flight: dict[int, InFlight] = field(default_factory=dict)  # the clients that train, by id
    versions: dict[int, Version] = field(default_factory=dict)  # what they got

    def check(self, num_clients: int, least: int) -> None:
        """Refuse steps of too many or too few replies."""
        self.settings.check(num_clients, least)

    def select(self, start: RoundStart) -> Selection:
        """Let clients run until K have finished; return their messages, each with its version.

        Fewer finish if all clients have been tried, and dropped out or were too old.
        """
        number, before = start.number, start.number - 1
        # a run that is resumed has asked nobody yet
        known = start.ask(sorted(self.in_flight))
        self.in_flight = {client: self.in_flight[client] for client in known}
        self._keep(start)
        step = SimulatedStep(self, start, start.clock)
        found = collect(step.arrivals(), self.settings, number)
        messages: dict[int, Message] = {}
        for version in sorted(set(found.versions.values())):
            got = self.versions[version]
            clients = sorted(client for client, of in found.versions.items() if of == version)
            record = start.arrays if version == before else to_record(got.params)
            messages |= start.write(clients, version + 1, record, got.payloads)
        seconds = step.clock - start.clock
        outcome = Outcome(sorted(messages), sorted(found.lost), sorted(found.late), seconds)
        models = {version: got.params for version, got in self.versions.items()}
        messages = dict(sorted(messages.items()))
        return self.settings.selection(
            number, found.versions, models, outcome, start.clock, messages
        )

    def forget(self) -> None:
        """Give up the clients that train: their states and what they got are no longer valid.

        If a client started again at zero, its old c_i+ - c_i would stay in SCAFFOLD's c.
        """
        self.in_flight.clear()

    def _keep(self, start: RoundStart) -> None:
        """Keep what clients that start now get; forget what nobody needs any more."""
        present, broadcast = start.availability.trainers, start.step.broadcast
        payloads = broadcast(present[0])
        for client in present[1:2]:
            own = [n for n, one in broadcast(client).items() if one is not payloads[n]]
            if own:
                raise ConfigError(
                    f"strategy.asynchronous: the server sends every client its own {own}, and of a "
                    "version one is kept: choose another method, or rounds that wait"
                )
        needed = {one.version for one in self.in_flight.values()}
        self.versions = {v: got for v, got in self.versions.items() if v in needed}
        self.versions[start.number - 1] = Version(to_tensors(start.arrays), payloads)

    # ---- what survives a restart -------------------------------------------------------------

    def in_flight_state(self) -> dict[str, list[float]]:
        """Return the clients in flight: version and time, by client id as text."""
        return {str(i): [one.version, one.finishes] for i, one in sorted(self.in_flight.items())}

    def tensors(self) -> dict[str, Tensors]:
        """Return the versions as named groups of tensors."""
        groups: dict[str, Tensors] = {}
        for version, got in self.versions.items():
            groups[f"{_PREFIX}{version}/{_MODEL}"] = got.params
            for name, tensors in got.payloads.items():
                groups[f"{_PREFIX}{version}/{name}"] = tensors
        return groups

    def restore(self, in_flight: Mapping[str, Sequence[float]], tensors: Payloads) -> None:
        """Restore :meth:`in_flight_state` and :meth:`tensors`."""
        self.in_flight = {
            int(client): InFlight(int(version), float(finishes))
            for client, (version, finishes) in in_flight.items()
        }
        parts: dict[int, dict[str, Tensors]] = {}
        for key, group in tensors.items():
            if key.startswith(_PREFIX):
                version, _, name = key.removeprefix(_PREFIX).partition("/")
                parts.setdefault(int(version), {})[name] = group
        self.versions = {v: Version(part.pop(_MODEL), part) for v, part in parts.items()}


@dataclass
class SimulatedStep:
    """A step in progress; ``clock`` is the simulated time, in seconds."""

    clients: SimulatedClients
    start: RoundStart
    clock: float

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the clients as they finish, and start others in their place.

        A client that has finished, or was lost, in this step does not start again in it.
        """
        clients, number, through = self.clients, self.start.number, set[int]()
        at_once = len(clients.sampler.sample(number, len(self.start.availability.trainers)))
        num_bytes = self.start.num_bytes
        rng = np.random.default_rng([STARTS, clients.system.seed, number])
        while True:
            self._start(at_once, through, num_bytes, rng)
            flying = clients.in_flight
            if not flying:  # all have been tried
                return
            client = min(flying, key=lambda one: (flying[one].finishes, one))
            one = flying.pop(client)
            through.add(client)
            self.clock = max(self.clock, one.finishes)
            lost = clients.system.drops_out(one.version + 1, client)
            yield Arrival(client, one.version, lost="it has dropped out" if lost else "")

    def _start(
        self, at_once: int, through: set[int], num_bytes: int, rng: np.random.Generator
    ) -> None:
        """Start clients until M train; if nobody is there, start them later."""
        clients, present = self.clients, self.start.availability.trainers
        busy = {*clients.in_flight, *through}
        if not clients.in_flight:
            idle = idle_clients(present, busy)
            if not idle:
                return
            self.clock = clients.system.until_available(idle, self.clock, 1)
        drawn = self._draw(present, busy, at_once - len(clients.in_flight), rng)
        for client in self.start.ask(drawn):
            work = work_of(clients.options, self.start.num_examples(client))
            finishes = self.clock + clients.system.seconds(client, work, num_bytes)
            clients.in_flight[client] = InFlight(self.start.number - 1, finishes)

    def _draw(
        self, present: Sequence[int], busy: set[int], size: int, rng: np.random.Generator
    ) -> list[int]:
        """Return so many idle clients that are there, drawn uniformly; all, if they are fewer.

        In a large simulation only clients that are drawn are looked at.
        """
        system, drawn = self.clients.system, dict[int, None]()
        for _ in range(_TRIES if len(present) > _FEW else 0):
            if len(drawn) >= size:
                return sorted(drawn)
            tried = [present[i] for i in rng.integers(len(present), size=size - len(drawn))]
            free = [client for client in dict.fromkeys(tried) if client not in busy]
            drawn |= dict.fromkeys(system.available(free, self.clock))
        idle = system.available(idle_clients(present, {*busy, *drawn}), self.clock)
        size = max(0, min(size - len(drawn), len(idle)))
        rest = rng.choice(len(idle), size=size, replace=False).tolist()
        return sorted([*drawn, *(idle[i] for i in rest)])
