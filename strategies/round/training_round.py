"""A training round in progress: the value that connects its messages with their replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message

from fedhet.strategies.base import Tensors
from fedhet.strategies.round.reply_fold import FoldRule
from fedhet.strategies.round.round_report import RoundReport


@dataclass(frozen=True)
class TrainingRound:
    """The messages of a round and what their replies are checked against.

    Iterating yields the messages, as Flower expects of ``configure_train``.
    """

    params: Tensors  # x and the buffers, as sent
    messages: Mapping[int, Message]  # by client id
    rule: FoldRule  # what their replies must be, and how they are added up
    timeout: float  # seconds to wait for the replies
    report: RoundReport  # completed step by step

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
