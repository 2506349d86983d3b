"""The replies of a round, taken one by one: added up and freed, or kept for parts that need them.

Partial folds, such as those of a simulation's workers, merge to the same bits (round/exact_sum.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from flwr.app import Message

from fedhet.strategies.base import Norms, RefusedReplyError, Reply, ReplySum, ServerSide, Weighting
from fedhet.strategies.round.exact_sum import COARSE, FINE, Empty, ExactSum, plain_empty
from fedhet.strategies.round.update_diagnostics import length_of, norm
from fedhet.strategies.wire.border import Expected, decode
from fedhet.strategies.wire.records import (
    UNASKED,
    NonFiniteReplyError,
    count_bytes,
    matched,
    no_reply,
    shapes_of,
)


@dataclass(frozen=True)
class Weights:
    """What each reply weighs in a sum."""

    weighting: Weighting  # of the updates
    # the weights of stale replies, by client id; 1 where it is not named
    discounts: Mapping[int, float] = field(default_factory=dict)

    def undiscounted(self, reply: Reply) -> float:
        """Return the weight of a client's update without the discount of a stale one."""
        return float(reply.num_examples) if self.weighting == "examples" else 1.0

    def of_update(self, reply: Reply) -> float:
        """Return the weight of a client's update."""
        return self.undiscounted(reply) * self.discounts.get(reply.client_id, 1.0)

    def of_buffers(self, reply: Reply) -> float:
        """Return the weight of a client's buffers."""
        return float(reply.num_examples) * self.discounts.get(reply.client_id, 1.0)


@dataclass(frozen=True)
class FoldSettings:
    """How replies are checked and added up; it can be sent to a worker."""

    expected: Expected  # what every reply must be
    weights: Weights  # of the replies
    payloads: Collection[str] = ()  # names of those that are summed
    keep: bool = False  # keep the replies in full, to be added up later
    # the step to which clients round their numbers for a secure sum; 0: no rounding
    rounding: float = 0.0


class RunningSum:
    """Sums replies; each one's numbers and norms stay. ``empty``: see ExactSum."""

    def __init__(
        self, weights: Weights, payloads: Collection[str] = (), empty: Empty = plain_empty
    ) -> None:
        self.weights = weights
        self.replies: list[Reply] = []
        self.update, self.buffers = ExactSum(COARSE, empty), ExactSum(FINE, empty)
        self.payloads = {name: ExactSum(FINE, empty) for name in payloads}

    def add(self, reply: Reply) -> None:
        """Add a reply."""
        lengths = self.update.add(reply.update, self.weights.of_update(reply))
        self.buffers.add(reply.buffers, self.weights.of_buffers(reply))
        payloads = {
            name: length_of(self.payloads[name].add(tensors))
            if name in self.payloads
            else norm(tensors)
            for name, tensors in reply.payloads.items()
        }
        norms = Norms(lengths, payloads)
        self.replies.append(replace(reply, update={}, payloads={}, buffers={}, norms=norms))

    def merge(self, other: Self, *, borrow: bool = False) -> None:
        """Add the replies of another part; ``borrow``: see :meth:`ExactSum.merge`."""
        self.update.merge(other.update, borrow=borrow)
        self.buffers.merge(other.buffers, borrow=borrow)
        for name, total in self.payloads.items():
            total.merge(other.payloads[name], borrow=borrow)
        self.replies += other.replies

    def keep(self) -> None:
        """Copy what is borrowed."""
        for one in (self.update, self.buffers, *self.payloads.values()):
            one.keep()

    def total(self) -> ReplySum:
        """Return the sum of at least one reply."""
        replies = sorted(self.replies, key=lambda reply: reply.client_id)
        whole = sum(map(self.weights.undiscounted, replies))
        return ReplySum(
            replies,
            weights=[self.weights.of_update(reply) / whole for reply in replies],
            update=self.update.over(whole),
            payloads={name: total.over(1.0) for name, total in self.payloads.items()},
            buffers=self.buffers.over(float(sum(reply.num_examples for reply in replies))),
        )


def sum_of(replies: Sequence[Reply], weights: Weights, payloads: Collection[str] = ()) -> ReplySum:
    """Return the sum of replies in full."""
    running = RunningSum(weights, payloads)
    for reply in replies:
        running.add(reply)
    return running.total()


class ReplyFold:
    """The replies of a round so far, and why others were refused. ``empty``: see ExactSum.

    Attributes:
        sum: of the valid replies; None if they are kept in full.
        in_full: the valid replies, if they are kept.
        refused: why replies were refused, by client id.
        unasked: messages that answer no question of the round.
        non_finite: how many replies were refused because of NaN or Inf.
        bytes_up: of all messages that came.
    """

    def __init__(
        self,
        settings: FoldSettings,
        check: Callable[[Reply], None] | None = None,
        empty: Empty = plain_empty,
    ) -> None:
        self.settings = settings
        keep = settings.keep
        self.sum = None if keep else RunningSum(settings.weights, settings.payloads, empty)
        self.in_full: list[Reply] = []
        self.refused: dict[int, str] = {}
        self.unasked: list[str] = []
        self.non_finite = 0
        self.bytes_up = 0
        self._check = check  # not sent: see __getstate__

    def __getstate__(self) -> dict[str, object]:
        """Leave behind what a worker does not need: the server's checks."""
        return {**self.__dict__, "_check": None}

    def take(self, client: int, message: Message) -> None:
        """Decode a client's message; add it up, keep it, or note why it is refused."""
        if message.has_content():
            self.bytes_up += count_bytes(message.content)
        try:
            reply = decode(message, client, self.settings.expected)
            if self._check is not None:
                self._check(reply)
        except RefusedReplyError as refusal:
            self.refused[client] = str(refusal)
            self.non_finite += isinstance(refusal, NonFiniteReplyError)
            return
        if self.sum is None:
            self.in_full.append(reply)
        else:
            self.sum.add(reply)

    def merge(self, other: Self, *, borrow: bool = False) -> None:
        """Take over the replies of another part; ``borrow``: see :meth:`ExactSum.merge`."""
        if self.sum is not None and other.sum is not None:
            self.sum.merge(other.sum, borrow=borrow)
        self.in_full += other.in_full
        self.refused |= other.refused
        self.unasked += other.unasked
        self.non_finite += other.non_finite
        self.bytes_up += other.bytes_up

    @property
    def replies(self) -> list[Reply]:
        """The valid replies by client id: in full if they are kept, else their numbers."""
        taken = self.in_full if self.sum is None else self.sum.replies
        return sorted(taken, key=lambda reply: reply.client_id)

    def total(self) -> ReplySum:
        """Return the sum of the valid replies, at least one."""
        if self.sum is not None:
            return self.sum.total()
        return sum_of(self.in_full, self.settings.weights, self.settings.payloads)

    def refuse_misfits(self) -> None:
        """Refuse kept replies whose summed payloads have other shapes than most clients'."""
        for name in self.settings.payloads:
            replies = [reply for reply in self.replies if name in reply.payloads]
            shapes = {r.client_id: shapes_of(r.payloads[name]) for r in replies}
            counts = Counter(map(str, shapes.values()))
            usual = max(counts, key=lambda text: counts[text], default="")
            self.refused |= {
                client: f"its payload {name!r} has the shapes {found}, and most clients' {usual}: "
                "give all sites the same task.model and classes"
                for client, found in shapes.items()
                if str(found) != usual
            }
        self.in_full = [one for one in self.in_full if one.client_id not in self.refused]


def fold_replies(
    replies: Iterable[Message], sent: Mapping[int, Message], fold: ReplyFold, timeout_seconds: float
) -> None:
    """Take the replies to messages ``sent`` by client id, as they arrive.

    ``timeout_seconds`` is how long the round waited for the replies that are missing in the end.
    """
    for client, reply in matched(replies, sent):
        if client is None:
            fold.unasked.append(f"node {reply.metadata.src_node_id}: {UNASKED}")
        else:
            fold.take(client, reply)
    add_missing(fold, sent, timeout_seconds)


def add_missing(fold: ReplyFold, sent: Collection[int], timeout_seconds: float) -> None:
    """Note which of the clients that were asked have not answered."""
    missing = set(sent) - fold.refused.keys() - {reply.client_id for reply in fold.replies}
    fold.refused |= dict.fromkeys(missing, no_reply(timeout_seconds))


def summed_payloads(server_sides: Mapping[str, ServerSide]) -> frozenset[str]:
    """Return the payloads of which a server side reads the sum."""
    return frozenset(
        name
        for side in server_sides.values()
        if type(side).reduce is not ServerSide.reduce
        or type(side).release is not ServerSide.release
        for name in side.needs | side.adds
    )
