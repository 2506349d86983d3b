"""Asynchronous rounds on a simulated clock: who finishes next, and from which model they started.

Client i starts at a time of the clock with the server's model of then, version v (the model after
step v), and finishes when its system says. Step t takes the next K finishers. They are trained
only now, each from its own version, which is kept as long as somebody needs it: the result is that
of clients that really run side by side, and the same on every runtime.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Payloads, ReplySum, Tensors
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.systems import ClientSystem, SimulatedRound
from fedhet.strategies.round.chosen import Chosen
from fedhet.strategies.round.cohort import Exchange, work_of
from fedhet.strategies.slots import ClientSampler
from fedhet.strategies.wire.records import to_record, to_tensors

STARTS = 0x57  # stream of the run's seed: who starts next
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
class SimulatedClients:
    """Chooses the clients of every step, as :class:`~.cohort.Cohorts` does those of a round.

    Attributes:
        settings: K, s(tau), and what is too old.
        sampler: its number of clients of a round is M, how many train at any time.
        system: how long each client takes, and who drops out.
        options: of local training, which say how long it is.
        in_flight: the clients that train, by id.
        versions: what they got.
    """

    settings: Asynchronous
    sampler: ClientSampler
    system: ClientSystem
    options: LocalTrainingConfig | None
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)

    def choose(self, exchange: Exchange, step: int, clock: float, arrays: ArrayRecord) -> Chosen:
        """Let clients run until K have finished; return their messages, each with its version.

        Where all clients have been tried, and dropped out or were too old, they are fewer.

        Args:
            exchange: with whom, and how messages are written.
            step: t; who starts meanwhile gets version t - 1.
            clock: the simulated time, in seconds.
            arrays: x, version t - 1.
        """
        availability, before = exchange.availability, step - 1
        # a run that is resumed has asked nobody yet
        known = availability.ask(exchange.grid, sorted(self.in_flight))
        self.in_flight = {client: self.in_flight[client] for client in known}
        at_once = len(self.sampler.sample(step, len(availability.present)))
        self._keep(before, to_tensors(arrays), exchange, availability.present)
        num_bytes = exchange.num_bytes(arrays)
        rng = np.random.default_rng([STARTS, self.system.seed, step])
        finished: dict[int, int] = {}
        dropped, late = list[int](), list[int]()
        asked_at = clock
        while len(finished) < self.settings.buffer:
            done = {*finished, *dropped, *late}
            clock = self._start(exchange, before, clock, at_once, done, num_bytes, rng)
            if not self.in_flight:  # all have been tried: the step has fewer replies
                break
            client = min(self.in_flight, key=lambda one: (self.in_flight[one].finishes, one))
            one = self.in_flight.pop(client)
            clock = max(clock, one.finishes)
            if self.system.drops_out(one.version + 1, client):
                dropped.append(client)
            elif self.settings.too_old(before - one.version):
                late.append(client)
            else:
                finished[client] = one.version
        messages: dict[int, Message] = {}
        for version in sorted(set(finished.values())):
            kept = self.versions[version]
            clients = sorted(client for client, of in finished.items() if of == version)
            record = arrays if version == before else to_record(kept.params)
            messages |= exchange.write(version + 1, record, clients, lambda _, k=kept: k.payloads)  # type: ignore[misc]
        fate = SimulatedRound(sorted(finished), sorted(dropped), sorted(late), clock - asked_at)
        settings = self.settings
        discounts = {client: settings.weight(before - v) for client, v in finished.items()}

        def rebase(total: ReplySum, tensors: Tensors) -> ReplySum:
            models = {version: kept.params for version, kept in self.versions.items()}
            started = Started(finished, discounts, models, settings.towards_model)
            return started.rebase(total, tensors)

        return Chosen(
            dict(sorted(messages.items())),
            fate,
            asked_at,
            finished,
            discounts,
            rebase,
        )

    def forget(self) -> None:
        """Give up who is in flight: their client states, and what they got, are not valid any more.

        A c_i+ - c_i of one that starts again at zero would stay in SCAFFOLD's c.
        """
        self.in_flight.clear()

    def _start(
        self,
        exchange: Exchange,
        version: int,
        clock: float,
        at_once: int,
        done: Collection[int],
        num_bytes: int,
        rng: np.random.Generator,
    ) -> float:
        """Start clients until M train; return the time, later if nobody was there to start.

        Who has finished, or was lost, in this step does not start again in it.
        """
        present, busy = exchange.availability.present, {*self.in_flight, *done}
        if not self.in_flight:
            idle = idle_clients(present, busy)
            if not idle:
                return clock
            clock = self.system.until_available(idle, clock, 1)
        drawn = self._draw(present, busy, clock, at_once - len(self.in_flight), rng)
        for client in exchange.availability.ask(exchange.grid, drawn):
            work = work_of(self.options, exchange.availability.registry.num_examples[client])
            finishes = clock + self.system.seconds(client, work, num_bytes)
            self.in_flight[client] = InFlight(version, finishes)
        return clock

    def _draw(
        self,
        present: Sequence[int],
        busy: Collection[int],
        clock: float,
        size: int,
        rng: np.random.Generator,
    ) -> list[int]:
        """Return so many idle clients that are there, drawn uniformly; all, if they are fewer.

        Of many clients, none is looked at but those that are drawn.
        """
        drawn: dict[int, None] = {}
        for _ in range(_TRIES if len(present) > _FEW else 0):
            if len(drawn) >= size:
                return sorted(drawn)
            tried = [present[i] for i in rng.integers(len(present), size=size - len(drawn))]
            free = [client for client in dict.fromkeys(tried) if client not in busy]
            drawn |= dict.fromkeys(self.system.available(free, clock))
        idle = self.system.available(idle_clients(present, {*busy, *drawn}), clock)
        size = max(0, min(size - len(drawn), len(idle)))
        rest = rng.choice(len(idle), size=size, replace=False).tolist()
        return sorted([*drawn, *(idle[i] for i in rest)])

    def _keep(
        self, version: int, params: Tensors, exchange: Exchange, present: Sequence[int]
    ) -> None:
        """Keep what clients get that start now; forget what nobody needs any more."""
        step = exchange.step
        payloads = step.broadcast(present[0])
        for client in present[1:2]:
            own = [n for n, one in step.broadcast(client).items() if one is not payloads[n]]
            if own:
                raise ConfigError(
                    f"strategy.asynchronous: the server sends every client its own {own}, and of a "
                    "version one is kept: choose another method, or rounds that wait"
                )
        needed = {one.version for one in self.in_flight.values()}
        self.versions = {v: kept for v, kept in self.versions.items() if v in needed}
        self.versions[version] = Version(params, payloads)

    # ---- what survives a restart -------------------------------------------------------------

    def state(self) -> dict[str, list[float]]:
        """Return the clients in flight: version and time, by client id as text."""
        return {str(i): [one.version, one.finishes] for i, one in sorted(self.in_flight.items())}

    def tensors(self) -> dict[str, Tensors]:
        """Return the versions as named groups of tensors."""
        groups: dict[str, Tensors] = {}
        for version, kept in self.versions.items():
            groups[f"{_PREFIX}{version}/{_MODEL}"] = kept.params
            for name, tensors in kept.payloads.items():
                groups[f"{_PREFIX}{version}/{name}"] = tensors
        return groups

    def restore(self, in_flight: Mapping[str, Sequence[float]], state: Payloads) -> None:
        """Restore :meth:`state` and :meth:`tensors`."""
        self.in_flight = {
            int(client): InFlight(int(version), float(finishes))
            for client, (version, finishes) in in_flight.items()
        }
        parts: dict[int, dict[str, Tensors]] = {}
        for key, tensors in state.items():
            if key.startswith(_PREFIX):
                version, _, name = key.removeprefix(_PREFIX).partition("/")
                parts.setdefault(int(version), {})[name] = tensors
        self.versions = {v: Version(part.pop(_MODEL), part) for v, part in parts.items()}


@dataclass(frozen=True)
class Started:
    """What the clients of a step started from, which is not what the server has by now.

    Attributes:
        versions: of the models that they got, by client id.
        discounts: s(tau), by client id.
        models: x_v and the buffers, by version; of FedBuff's, the buffers are enough.
        towards_model: FedAsync's step, to y_i and not along y_i - x_i.
    """

    versions: Mapping[int, int]
    discounts: Mapping[int, float]
    models: Mapping[int, Tensors]
    towards_model: bool

    def rebase(self, total: ReplySum, tensors: Tensors) -> ReplySum:
        """Return the sum of steps to where the clients have arrived, from ``tensors``.

        Buffers always go there: the result is a mean of the clients' and the server's. The changes
        of a variance that was another one when they were measured could make it negative.
        """
        examples = math.fsum(reply.num_examples for reply in total.replies)
        shares = [r.num_examples * self.discounts[r.client_id] / examples for r in total.replies]
        total = replace(total, buffers=self._rebased(total, total.buffers, shares, tensors))
        if self.towards_model:
            update = self._rebased(total, total.update, total.weights, tensors)
            total = replace(total, update=update)
        return total

    def _rebased(
        self, total: ReplySum, changes: Tensors, weights: Sequence[float], tensors: Tensors
    ) -> dict[str, Tensor]:
        """Return the weighted sum of changes y_i - x_i as that of y_i - x."""
        moved: dict[str, Tensor] = {name: 0.0 * value for name, value in changes.items()}
        own = [self.versions[reply.client_id] for reply in total.replies]
        for version in sorted(set(own)):
            weight = math.fsum(w for of, w in zip(own, weights, strict=True) if of == version)
            kept = self.models[version]
            moved = {n: m + weight * (kept[n] - tensors[n]) for n, m in moved.items()}
        return {name: value + moved[name] for name, value in changes.items()}


def idle_clients(present: Sequence[int], busy: Collection[int]) -> list[int]:
    """Return who of the clients is not busy, in order."""
    return [client for client in present if client not in busy]
