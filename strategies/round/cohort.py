"""The clients of a round: sampled of those that are there, and with a simulated system's fate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Payloads
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.samplers import most_clients
from fedhet.strategies.modes.systems import ClientSystem, SimulatedRound
from fedhet.strategies.round.chosen import Chosen
from fedhet.strategies.round.registration import ClientAvailability
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import ClientSampler
from fedhet.strategies.wire.message_sizes import MessageSizes
from fedhet.strategies.wire.messages import MessageWriter


def drawn_by(sampler: ClientSampler, round: int, size: int) -> list[int]:
    """Return the positions that a sampler draws; refuse what is none, or is drawn twice."""
    found = list(sampler.sample(round, size))
    try:
        whole = all(0 <= one < size and one == int(one) for one in found)
    except (TypeError, ValueError):  # no numbers
        whole = False
    if not whole or len(set(found)) < len(found):
        raise ConfigError(
            f"strategy/sampler: {type(sampler).__name__} drew {found[:10]}: it must draw different "
            f"whole numbers from 0 to {size - 1}"
        )
    return [int(one) for one in found]


@dataclass(frozen=True)
class Exchange:
    """With whom a round is, and how its messages are written."""

    grid: Grid
    availability: ClientAvailability
    writer: MessageWriter
    config: ConfigRecord  # further entries of the clients' config
    step: ServerStep
    sizes: MessageSizes

    def num_bytes(self, arrays: ArrayRecord) -> int:
        """Return how many bytes go to a client and come back, as they travel."""
        payloads = self.step.broadcast(self.availability.present[0])
        return self.sizes.of(arrays, payloads, self.step.expected())

    def write(
        self,
        round: int,
        arrays: ArrayRecord,
        clients: list[int],
        broadcast: Callable[[int], Payloads] | None = None,
    ) -> dict[int, Message]:
        """Return the messages to be sent, by client id."""
        for client in clients:
            self.step.asked(client)
        sent = broadcast or self.step.broadcast
        return self.writer.train(round, arrays, self.config, clients, sent)


@dataclass(frozen=True)
class Cohorts:
    """Chooses the clients of every round.

    Attributes:
        sampler: of those that are there.
        system: a simulation's slow, absent and vanishing clients; None: there are none.
        from_all: sample of all N, so that no absence shows (ServerSide.averages).
        options: of local training, which say how long it is.
        least: so many clients a round waits for.
    """

    sampler: ClientSampler
    system: ClientSystem | None
    from_all: bool
    options: LocalTrainingConfig | None
    least: int = 1

    def __post_init__(self) -> None:
        """Refuse a system where a round has a fixed number of clients."""
        if self.system is not None and self.from_all:
            raise ConfigError(
                "system: strategy/differential_privacy counts on a fixed number of clients in a "
                "round, which late and absent ones would change: set system=none"
            )

    def choose(self, exchange: Exchange, round: int, clock: float, arrays: ArrayRecord) -> Chosen:
        """Return a round's messages.

        Args:
            exchange: with whom, and how messages are written.
            round: t.
            clock: the simulated time, in seconds.
            arrays: x.
        """
        fate, clock = self._fate(exchange, round, clock, arrays)
        return Chosen(exchange.write(round, arrays, fate.clients), fate, clock)

    def forget(self) -> None:
        """Do nothing: between rounds nobody trains."""

    def _fate(
        self, exchange: Exchange, round: int, clock: float, arrays: ArrayRecord
    ) -> tuple[SimulatedRound, float]:
        availability, grid = exchange.availability, exchange.grid
        present = availability.present
        if self.from_all:
            known = set(present)
            drawn = drawn_by(self.sampler, round, len(availability.registry))
            chosen = availability.ask(grid, [client for client in drawn if client in known])
            return SimulatedRound(chosen, [], [], 0.0), clock
        if self.system is None:
            chosen = [present[i] for i in drawn_by(self.sampler, round, len(present))]
            return SimulatedRound(availability.ask(grid, chosen), [], [], 0.0), clock
        clock = self.system.until_available(present, clock, self._needed(len(present)))
        present = self.system.available(present, clock)
        chosen = [present[i] for i in drawn_by(self.sampler, round, len(present))]
        asked = availability.ask(grid, self.system.asked(chosen, present, round))
        num_bytes = exchange.num_bytes(arrays)
        work = {i: work_of(self.options, availability.registry.num_examples[i]) for i in asked}
        seconds = {i: self.system.seconds(i, examples, num_bytes) for i, examples in work.items()}
        return self.system.play(round, seconds, len(chosen)), clock

    def _needed(self, present: int) -> int:
        """Return of how many clients that are there the sampler may draw enough for a round."""
        most = partial(most_clients, self.sampler)
        return bisect_left(range(present), self.least, lo=min(self.least, present), key=most)


def work_of(options: LocalTrainingConfig | None, num_examples: int) -> int:
    """Return how many examples a client goes through, each as often as the recipe says."""
    if options is None or options.steps is None:
        return num_examples * (1 if options is None else options.epochs or 1)
    return options.steps * min(options.batch_size, num_examples)
