"""The clients of a round or step, and what they are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from fedhet.strategies.base import ReplySum, Tensors
from fedhet.strategies.components.systems import SimulatedRound


@dataclass(frozen=True)
class Chosen:
    """The messages of a round by client id, and who is asked in vain.

    Attributes:
        messages: to the clients whose replies count.
        fate: who answers, and how long the round takes on the simulated clock.
        clock: the simulated time at which they are asked.
        versions: of asynchronous rounds, the step after which each client started.
        discounts: the weights of stale replies, by client; 1 where it is not named.
        shift: (sum, x) -> what is added to the mean update; None: nothing.
    """

    messages: Mapping[int, Message]
    fate: SimulatedRound
    clock: float
    versions: Mapping[int, int] = field(default_factory=dict)
    discounts: Mapping[int, float] = field(default_factory=dict)
    shift: Callable[[ReplySum, Tensors], Tensors] | None = None

    def rounds(self, round: int) -> dict[int, int]:
        """Return which round each client was told: t, or that in which it started."""
        return {client: self.versions.get(client, round - 1) + 1 for client in self.messages}
