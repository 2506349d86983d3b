"""Who trains in a round, and the messages that they are sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, Payloads, ReplySum, Tensors
from fedhet.strategies.round.availability import ClientAvailability
from fedhet.strategies.round.reply_fold import ReplyFold
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import ClientSampler
from fedhet.strategies.wire.messages import MessageWriter, bytes_moved


@dataclass(frozen=True)
class RoundStart:
    """What is known when a round begins, and what clients are sent."""

    number: int  # t, from 1
    clock: float  # the simulated time, in seconds
    arrays: ArrayRecord  # x, as it is sent
    config: ConfigRecord  # further entries of the clients' config
    grid: Grid  # Flower's connection to the nodes
    availability: ClientAvailability  # which clients are connected
    step: ServerStep  # the server's, whose sides give the payloads
    writer: MessageWriter  # of messages
    client_sides: Mapping[str, ClientSide]  # the methods' client halves, by name

    @property
    def num_bytes(self) -> int:
        """How many bytes go to a client and come back, as they travel."""
        payloads = self.step.broadcast(self.availability.trainers[0])
        expected, downlink = self.step.expected(), self.writer.downlink
        return bytes_moved(downlink, self.client_sides, self.arrays, payloads, expected)

    def write(
        self,
        clients: Sequence[int],
        round: int | None = None,
        arrays: ArrayRecord | None = None,
        payloads: Payloads | None = None,
    ) -> dict[int, Message]:
        """Return the messages that ask clients to train, by client id: on x, unless told otherwise.

        Args:
            clients: to ask.
            round: that they are told; None: t.
            arrays: what they start from; None: x.
            payloads: that they get; None: what the sides send each now.
        """
        for client in clients:
            self.step.asked(client)
        sent = self.step.broadcast if payloads is None else lambda client: payloads
        model = self.arrays if arrays is None else arrays
        return self.writer.train(round or self.number, model, self.config, clients, sent)

    def ask(self, clients: Sequence[int]) -> list[int]:
        """Return those of the clients that can take part; see ClientAvailability."""
        return self.availability.ask(self.grid, clients)

    def num_examples(self, client: int) -> int:
        """Return how many examples a client has registered."""
        return self.availability.registry.num_examples[client]


@dataclass(frozen=True)
class Outcome:
    """The outcome for the clients that are asked, on the simulated clock."""

    clients: Sequence[int]  # whose replies count, by id
    dropped: Sequence[int] = ()  # they never answer
    late: Sequence[int] = ()  # they answer after the round has ended
    seconds: float = 0.0  # how long the round takes


@dataclass(frozen=True)
class Selection:
    """The messages of a round by client id, and whose replies will count."""

    messages: Mapping[int, Message]  # to the clients whose replies count
    outcome: Outcome  # of those that are asked
    clock: float  # the simulated time at which they are asked
    # of asynchronous rounds, the step after which each client started
    versions: Mapping[int, int] = field(default_factory=dict)
    # the weights of stale replies, by client; 1 where it is not named
    discounts: Mapping[int, float] = field(default_factory=dict)
    # (sum, x and the buffers) -> the sum of steps from there, if clients started elsewhere; None:
    # they started there
    rebase: Callable[[ReplySum, Tensors], ReplySum] | None = None
    # takes the replies of real clients, which come in any order, until the step can be taken;
    # ``versions`` then has all that may answer, and ``messages`` is empty
    arriving: Callable[[ReplyFold], Arrived] | None = None

    @property
    def clients(self) -> Collection[int]:
        """The clients whose replies count."""
        return self.versions or self.messages

    def rounds(self, round: int) -> dict[int, int]:
        """Return which round each client was told: t, or that in which it started."""
        return {client: self.versions.get(client, round - 1) + 1 for client in self.clients}


@dataclass(frozen=True)
class Arrived:
    """The outcome for real clients in asynchronous rounds."""

    clients: Collection[int]  # that have answered in time, by id
    late: Sequence[int]  # whose replies were too old
    staleness: Sequence[int]  # of the valid replies
    bytes_down: int  # sent


class Selector:
    """Selects who trains: a sample that the round waits for, or the clients that a mode selects.

    Only modes in which clients train from one round to the next have more than ``select``.
    """

    def check(self, num_clients: int, least: int) -> None:
        """Refuse a federation of so many clients, of which ``least`` must reply."""

    def select(self, start: RoundStart) -> Selection:
        """Return a round's clients and their messages."""
        raise NotImplementedError

    def forget(self) -> None:
        """Give up the clients that train: their states are no longer valid."""

    def in_flight_state(self) -> dict[str, list[float]]:
        """Return the clients that train between two rounds, for a checkpoint."""
        return {}

    def tensors(self) -> dict[str, Tensors]:
        """Return what those clients got, for a checkpoint."""
        return {}

    def restore(self, in_flight: Mapping[str, Sequence[float]], tensors: Payloads) -> None:
        """Restore :meth:`in_flight_state` and :meth:`tensors`."""


@dataclass(frozen=True)
class SampledClients(Selector):
    """Samples the clients of every round, which waits for them."""

    sampler: ClientSampler  # draws from the connected clients
    from_all: bool = False  # draw from all N, so that no absence shows (see ServerSide.leaves)

    def select(self, start: RoundStart) -> Selection:
        """Return a round's clients and their messages."""
        availability = start.availability
        present = availability.trainers
        if self.from_all:
            known, all_trainers = set(present), availability.all_trainers
            drawn = drawn_by(self.sampler, start.number, len(all_trainers))
            chosen = [all_trainers[i] for i in drawn if all_trainers[i] in known]
        else:
            chosen = [present[i] for i in drawn_by(self.sampler, start.number, len(present))]
        return selected(start, Outcome(start.ask(chosen)), start.clock)


def selected(start: RoundStart, outcome: Outcome, clock: float) -> Selection:
    """Return the selection of clients that all start from x."""
    return Selection(start.write(outcome.clients), outcome, clock)


def drawn_by(sampler: ClientSampler, round: int, size: int) -> list[int]:
    """Return the positions that a sampler draws.

    Raises:
        ConfigError: if a position is invalid or drawn twice.
    """
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
