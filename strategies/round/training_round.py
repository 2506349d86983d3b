"""A training round in progress: the value that connects its messages with their replies.

The four steps of a round are functions of it:

    select    -> TrainingRound   who trains, and what they are sent (selection.py, expectations.py)
    send      -> RoundReplies    here, or a mode's, such as a secure sum
    fold      -> ReplyFold       the replies are checked and added up (reply_fold.py)
    step      -> Stepped         the new x (server_step.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Reply, Tensors
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold, add_missing, fold_replies
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.round.selection import Selection


@dataclass(frozen=True)
class TrainingRound:
    """The messages of a round and what their replies are checked against.

    Iterating yields the messages, as Flower expects of ``configure_train``.
    """

    number: int  # t, from 1
    params: Tensors  # x and the buffers, as sent
    selection: Selection  # the clients, and what they are sent
    folding: FoldSettings  # what their replies must be, and how they are added up
    timeout: float  # seconds to wait for the replies
    report: RoundReport  # written as the round goes on

    @property
    def messages(self) -> Mapping[int, Message]:
        """The messages by client id."""
        return self.selection.messages

    def __iter__(self) -> Iterator[Message]:
        """Yield the messages."""
        return iter(self.messages.values())


@dataclass(frozen=True)
class RoundReplies:
    """The replies of a round as they arrive, with the round; ``aggregate_train`` needs both.

    An override that filters replies passes on ``RoundReplies(replies.round, filtered)``.
    """

    round: TrainingRound
    replies: Iterable[Message]

    def __iter__(self) -> Iterator[Message]:
        """Yield the replies."""
        return iter(self.replies)

    def fold(self, check: Callable[[Reply], None]) -> ReplyFold:
        """Return the valid replies, and why others are refused."""
        fold = ReplyFold(self.round.folding, check)
        fold_replies(self, self.round.messages, fold, self.round.timeout)
        return fold

    def complete(self, report: RoundReport) -> None:
        """Add to the finished round's report what only the sender knows."""


@dataclass(frozen=True)
class FoldedReplies(RoundReplies):
    """A round's replies that are already added up; nobody can read a single one."""

    folded: ReplyFold

    def fold(self, check: Callable[[Reply], None]) -> ReplyFold:
        """Return them; ``check`` has no single reply to look into."""
        add_missing(self.folded, self.round.messages, self.round.timeout)
        return self.folded


@runtime_checkable
class FoldingGrid(Protocol):
    """A grid whose workers decode and add up the replies where the clients are."""

    def send_and_fold(
        self, messages: Mapping[int, Message], settings: FoldSettings, timeout: float | None = None
    ) -> ReplyFold:
        """Send messages, by client id; return the sum of the replies that arrive in time."""


def send_round(
    grid: Grid, training: TrainingRound, check: Callable[[Reply], None] | None, *, own: bool
) -> RoundReplies:
    """Send a round's messages, and return its replies.

    Args:
        grid: whose workers may add up the replies.
        training: the round.
        check: the server sides' check of every single reply; None: they have none.
        own: the strategy overrides ``aggregate_train``, which reads the messages.
    """
    timeout, arriving = training.timeout, training.selection.arriving
    if arriving is not None:
        if own:
            raise ConfigError(
                "strategy.asynchronous on real sites adds replies up as they arrive: a strategy "
                "with an aggregate_train of its own needs rounds that wait"
            )
        fold = ReplyFold(training.folding, check)
        arrived = arriving(fold)
        training.report.take_arrived(arrived)
        versions = {client: training.selection.versions[client] for client in arrived.clients}
        selection = replace(training.selection, versions=versions)
        return FoldedReplies(replace(training, selection=selection), (), fold)
    adds = not own and check is None and not training.folding.keep
    if adds and isinstance(grid, FoldingGrid):
        folded = grid.send_and_fold(training.messages, training.folding, timeout)
        return FoldedReplies(training, (), folded)
    return RoundReplies(training, grid.send_and_receive(training, timeout=timeout))
