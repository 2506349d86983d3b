"""The replies of a round, taken one by one: added up and freed, or kept for parts that need them.

Partial folds, as of the workers of a simulation, merge to the same bits (round/exact_sum.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from flwr.app import Message

from fedhet.strategies.base import (
    ClientSide,
    RefusedReplyError,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
    Weighting,
)
from fedhet.strategies.round.exact_sum import ExactSum, Zeros, norms_of, plain_zeros
from fedhet.strategies.round.update_diagnostics import norm
from fedhet.strategies.wire.border import ExpectedReply
from fedhet.strategies.wire.records import NonFiniteReplyError, count_bytes, no_reply, with_senders


@dataclass(frozen=True)
class Limits:
    """What one client's reply may say of itself; None: not checked."""

    max_examples: int | None = None  # that it has registered
    max_steps: int | None = None  # that the recipe lets it take
    not_lost: str | None = None  # why it cannot have lost its state


@dataclass(frozen=True)
class SumRule:
    """How replies are added up.

    Attributes:
        weighting: of the updates.
        payloads: names of those that are summed.
        discounts: the weights of stale replies, by client id; 1 where it is not named.
    """

    weighting: Weighting
    payloads: Collection[str] = ()
    discounts: Mapping[int, float] = field(default_factory=dict)

    def weight(self, reply: Reply) -> float:
        """Return the weight of a client's update, if it is not stale."""
        return float(reply.num_examples) if self.weighting == "examples" else 1.0

    def discounted(self, reply: Reply) -> float:
        """Return the weight of a client's update."""
        return self.weight(reply) * self.discounts.get(reply.client_id, 1.0)

    def held(self, reply: Reply) -> float:
        """Return the weight of a client's buffers."""
        return float(reply.num_examples) * self.discounts.get(reply.client_id, 1.0)


@dataclass(frozen=True)
class FoldRule:
    """How replies are checked, and what becomes of them; it can be sent to a worker.

    Attributes:
        expected: what every reply must be.
        limits: of each client, by id.
        sum: how they are added up.
        keep: keep them instead, to be added up later.
    """

    expected: ExpectedReply
    limits: Mapping[int, Limits]
    sum: SumRule
    keep: bool = False


class RunningSum:
    """Replies that are added up; of each its numbers and norms stay. ``zeros``: see ExactSum."""

    def __init__(self, rule: SumRule, zeros: Zeros = plain_zeros) -> None:
        self.rule = rule
        self.replies: list[Reply] = []
        self.update, self.buffers = ExactSum(zeros), ExactSum(zeros)
        self.payloads = {name: ExactSum(zeros) for name in rule.payloads}

    def add(self, reply: Reply) -> None:
        """Add a reply."""
        self.update.add(reply.update, self.rule.discounted(reply))
        self.buffers.add(reply.buffers, self.rule.held(reply))
        for name in self.payloads.keys() & reply.payloads.keys():
            self.payloads[name].add(reply.payloads[name])
        norms = norms_of(reply.update)
        of_payloads = {name: norm(tensors) for name, tensors in reply.payloads.items()}
        light = replace(reply, update={}, payloads={}, buffers={})
        self.replies.append(replace(light, norms=norms, payload_norms=of_payloads))

    def merge(self, other: Self) -> None:
        """Add the replies of another part."""
        self.update.merge(other.update)
        self.buffers.merge(other.buffers)
        for name, total in self.payloads.items():
            total.merge(other.payloads[name])
        self.replies += other.replies

    def total(self) -> ReplySum:
        """Return the sum of at least one reply."""
        replies = sorted(self.replies, key=lambda reply: reply.client_id)
        whole = sum(map(self.rule.weight, replies))
        return ReplySum(
            replies,
            weights=[self.rule.discounted(reply) / whole for reply in replies],
            update=self.update.over(whole),
            payloads={name: total.over(1.0) for name, total in self.payloads.items()},
            buffers=self.buffers.over(float(sum(reply.num_examples for reply in replies))),
        )


def sum_of(replies: Sequence[Reply], rule: SumRule) -> ReplySum:
    """Return the sum of kept replies."""
    running = RunningSum(rule)
    for reply in replies:
        running.add(reply)
    return running.total()


class ReplyFold:
    """The replies of a round so far, and why others were refused. ``zeros``: see ExactSum."""

    def __init__(
        self,
        rule: FoldRule,
        check: Callable[[Reply], None] | None = None,
        zeros: Zeros = plain_zeros,
    ) -> None:
        self.rule = rule
        self.sum = None if rule.keep else RunningSum(rule.sum, zeros)
        self.kept: list[Reply] = []
        self.refused: dict[int, str] = {}  # why, by client id
        self.unasked: list[str] = []  # what came beside the replies
        self.non_finite = 0  # how many were refused since they held NaN or Inf
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
            limits = self.rule.limits[client]
            reply = self.rule.expected.decode(
                message, client, limits.max_examples, limits.max_steps, limits.not_lost
            )
            if self._check is not None:
                self._check(reply)
        except RefusedReplyError as refusal:
            self.refused[client] = str(refusal)
            self.non_finite += isinstance(refusal, NonFiniteReplyError)
            return
        if self.sum is None:
            self.kept.append(reply)
        else:
            self.sum.add(reply)

    def merge(self, other: Self) -> None:
        """Take over the replies of another part."""
        if self.sum is not None and other.sum is not None:
            self.sum.merge(other.sum)
        self.kept += other.kept
        self.refused |= other.refused
        self.unasked += other.unasked
        self.non_finite += other.non_finite
        self.bytes_up += other.bytes_up

    @property
    def replies(self) -> list[Reply]:
        """The valid replies by client id: whole if they are kept, else their numbers."""
        taken = self.kept if self.sum is None else self.sum.replies
        return sorted(taken, key=lambda reply: reply.client_id)

    def total(self) -> ReplySum:
        """Return the sum of the valid replies, at least one."""
        return sum_of(self.kept, self.rule.sum) if self.sum is None else self.sum.total()

    def refuse_misfits(self) -> None:
        """Refuse kept replies whose summed payloads have other shapes than most clients'."""
        for name in self.rule.sum.payloads:
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
        self.kept = [reply for reply in self.kept if reply.client_id not in self.refused]


def fold_replies(
    replies: Iterable[Message], sent: Mapping[int, Message], fold: ReplyFold, timeout_seconds: float
) -> None:
    """Take the replies to messages ``sent`` by client id, as they arrive.

    ``timeout_seconds`` is how long was waited for those that are missing in the end.
    """
    waiting = {message.metadata.dst_node_id: client for client, message in sent.items()}
    for node, reply in with_senders(replies, sent.values()):
        client = waiting.pop(node, None)
        if client is None:
            fold.unasked.append(f"node {node}: it was not asked, or has answered already")
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


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tuple(value.shape) for name, value in sorted(tensors.items())}


def known_shapes(payloads: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the payloads all of whose shapes are known before a reply comes."""
    closed = {
        name: {tensor: tuple(n for n in shape if n is not None) for tensor, shape in shapes.items()}
        for name, shapes in payloads.items()
    }
    return {name: shapes for name, shapes in closed.items() if shapes == payloads[name]}


def per_example(client_sides: Mapping[str, ClientSide]) -> frozenset[str]:
    """Return the payloads that grow with a client's number of examples."""
    return frozenset(name for side in client_sides.values() for name in side.per_example)
