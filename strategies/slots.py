"""What a method may replace beside its sides: aggregator, server optimizer, output, sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor

from fedhet.strategies.base import Cohort, Reads, Reply, ReplySum, ServerPart, Tensors, Weighting

# (x, replies) -> the replies to aggregate instead: alignment, clipping
ReplyTransform = Callable[[Tensors, Sequence[Reply]], Sequence[Reply]]
# (t in 1..T, T) -> factor of the local learning rate
Schedule = Callable[[int, int], float]


@runtime_checkable
class DeclaresReads(Protocol):
    """A part that says what it reads of the replies."""

    reads: Reads


def reads_of(part: object) -> Reads:
    """Return what a part reads: the replies, unless it says otherwise."""
    if isinstance(part, DeclaresReads):
        return part.reads
    return Reads.SUM if isinstance(part, SumAggregator) else Reads.REPLIES


@runtime_checkable
class Reorders(Protocol):
    """A transform that puts the clients' neurons into another order."""

    reorders: Literal[True]


class Observer(Protocol):
    """Measures a round and changes nothing; called before any transform.

    Attributes:
        key: the key of the recipe that asks for it; errors name it.

    Its attribute ``reads`` says what it reads; without one it reads the replies.
    """

    key: str

    def __call__(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], cohort: Cohort, /
    ) -> None:
        """Measure x, the sum of the valid replies, and these by client id if they are kept."""


@runtime_checkable
class Weighs(Protocol):
    """A ReplyAggregator that says how the clients weigh, in buffers and diagnostics."""

    @property
    def weighs(self) -> Weighting:
        """How clients weigh."""


class ReplyAggregator(Protocol):
    """(x, replies) -> Delta, over the trainable shared tensors; the server keeps all replies.

    If it weighs clients by their examples, it says so (:class:`Weighs`).
    """

    def __call__(self, params: Tensors, replies: Sequence[Reply], /) -> dict[str, Tensor]:
        """Return Delta; a buffer that it leaves out moves by the clients' mean change."""


@runtime_checkable
class SumAggregator(Protocol):
    """An aggregator that reads the weighted mean of the updates.

    If it also reads their norms, its attribute ``reads`` says so.
    """

    @property
    def weighting(self) -> Weighting:
        """How clients weigh."""

    def __call__(self, params: Tensors, total: ReplySum, /) -> dict[str, Tensor]:
        """Return Delta."""


class CombinesReplies(ServerPart):
    """A SumAggregator that replaces the whole sum of the replies, such as a robust one."""

    weighting: ClassVar[Weighting] = "clients"
    # how far each reply of the last round counted, by client id: 1 as in the plain mean or more; 0
    # not at all
    trust: dict[int, float]

    @property
    def least(self) -> int:
        """How many replies a round needs."""
        return 1

    def check_cohort(self, num_clients: int, most: int) -> None:
        """Refuse rounds of at most ``most`` of the ``num_clients`` clients, if that is too few."""

    def check_method(self, payloads: Sequence[str], output: Output) -> None:
        """Refuse, before round 1, a method whose parts it cannot protect.

        ``payloads`` are names of those that server sides read the sum of.
        """

    def combine(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], round: int
    ) -> ReplySum:
        """Return the sum that all parts read instead of ``total``, the sum of the replies."""
        raise NotImplementedError

    def __call__(self, params: Tensors, total: ReplySum, /) -> dict[str, Tensor]:
        """Return Delta: the update of :meth:`combine`."""
        return dict(total.update)


Aggregator = ReplyAggregator | SumAggregator


class ServerOptimizer(ServerPart):
    """Turns the aggregate Delta into new params."""

    def step(self, params: Tensors, update: Tensors, cohort: Cohort) -> dict[str, Tensor]:
        """Return the params after one step along ``update``."""
        raise NotImplementedError


class Output(Protocol):
    """The model that a round evaluates and stores; training continues from x.

    Its attribute ``reads`` says what it reads; without one it reads the replies.
    """

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> Tensors:
        """Return the trainable shared tensors of the output model from x, Delta and the new x."""


class ClientSampler(Protocol):
    """Chooses the cohort; a pure function of its seed, the round and the number of clients."""

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""
