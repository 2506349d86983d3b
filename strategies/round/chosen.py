"""The clients of a round or step, and what they are sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flwr.app import Message

from fedhet.strategies.base import ReplySum, Tensors
from fedhet.strategies.modes.systems import SimulatedRound

if TYPE_CHECKING:
    from fedhet.strategies.round.reply_fold import ReplyFold
    from fedhet.strategies.round.round_report import RoundReport


@dataclass(frozen=True)
class Chosen:
    """The messages of a round by client id, and who is asked in vain.

    Attributes:
        messages: to the clients whose replies count.
        fate: who answers, and how long the round takes on the simulated clock.
        clock: the simulated time at which they are asked.
        versions: of asynchronous rounds, the step after which each client started.
        discounts: the weights of stale replies, by client; 1 where it is not named.
        rebase: (sum, x and the buffers) -> the sum of steps from there, where the clients have
            started elsewhere; None: they have not.
        arriving: of real clients that train side by side, whose replies come in any order;
            ``versions`` then has all that may answer, and there are no messages.
    """

    messages: Mapping[int, Message]
    fate: SimulatedRound
    clock: float
    versions: Mapping[int, int] = field(default_factory=dict)
    discounts: Mapping[int, float] = field(default_factory=dict)
    rebase: Callable[[ReplySum, Tensors], ReplySum] | None = None
    arriving: Arriving | None = None

    @property
    def clients(self) -> Collection[int]:
        """The clients whose replies count."""
        return self.versions or self.messages

    def rounds(self, round: int) -> dict[int, int]:
        """Return which round each client was told: t, or that in which it started."""
        return {client: self.versions.get(client, round - 1) + 1 for client in self.clients}


class Arriving(Protocol):
    """Real clients in flight."""

    def collect(self, fold: ReplyFold, report: RoundReport) -> Collection[int]:
        """Take replies until the step can be taken; return the clients that have answered."""
