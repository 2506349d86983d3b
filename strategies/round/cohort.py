"""The clients of a round: sampled of those that are there, and with a simulated system's fate."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.serverapp import Grid

from fedhet.common.errors import ConfigError
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.systems import Constant, SimulatedRound
from fedhet.strategies.round.registration import ClientAvailability
from fedhet.strategies.slots import ClientSampler


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
    system: Constant | None
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

    def choose(
        self,
        grid: Grid,
        round: int,
        there: ClientAvailability,
        clock: float,
        num_bytes: int,
    ) -> tuple[SimulatedRound, float]:
        """Return a round's clients, and the simulated time at which they are asked.

        Args:
            grid: to ask clients that have not been asked who they are.
            round: t.
            there: who is connected.
            clock: the simulated time, in seconds.
            num_bytes: that are sent to a client; as many are taken to come back.
        """
        present = there.present
        if self.from_all:
            known = set(present)
            drawn = self.sampler.sample(round, len(there.registry))
            chosen = there.ask(grid, [client for client in drawn if client in known])
            return SimulatedRound(chosen, [], [], 0.0), clock
        if self.system is None:
            chosen = [present[i] for i in self.sampler.sample(round, len(present))]
            return SimulatedRound(there.ask(grid, chosen), [], [], 0.0), clock
        clock = self.system.until_available(present, clock, self.least)
        present = self.system.available(present, clock)
        chosen = [present[i] for i in self.sampler.sample(round, len(present))]
        asked = there.ask(grid, self.system.asked(chosen, present, round))
        examples, system = there.registry.num_examples, self.system
        seconds = {i: system.seconds(i, self._work(examples[i]), 2 * num_bytes) for i in asked}
        return self.system.play(round, seconds, len(chosen)), clock

    def _work(self, num_examples: int) -> int:
        """Return how many examples a client goes through, each as often as the recipe says."""
        options = self.options
        if options is None or options.steps is None:
            return num_examples * (1 if options is None else options.epochs or 1)
        return options.steps * min(options.batch_size, num_examples)
