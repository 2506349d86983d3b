"""What a method may replace beside its sides: aggregator, server optimizer, output, sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from fedhet.strategies.base import Cohort, Payloads, Reply, ReplySum, Tensors, Weighting

# (x, replies) -> the replies to aggregate instead: alignment, clipping
ReplyTransform = Callable[[Tensors, Sequence[Reply]], Sequence[Reply]]
# (t in 1..T, T) -> factor of the local learning rate
Schedule = Callable[[int, int], float]


class Observer(Protocol):
    """Measures a round and changes nothing; called before any transform.

    Attributes:
        keeps_replies: whether it reads single replies; without it and other such parts, none are.
        key: of the recipe, that asks for it; errors name it.

    One that reads norms of single updates says so in an attribute ``individual``, as an aggregator.
    """

    keeps_replies: bool
    key: str

    def __call__(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], cohort: Cohort, /
    ) -> None:
        """Measure x, the sum of the valid replies, and these by client id if they are kept."""


class ReplyAggregator(Protocol):
    """(x, replies) -> Delta, over the trainable shared tensors; all replies are kept for it.

    One that weighs clients by their examples says so in an attribute ``weighs``.
    """

    def __call__(self, params: Tensors, replies: Sequence[Reply], /) -> dict[str, Tensor]:
        """Return Delta; a buffer that it leaves out moves by the clients' mean change."""


@runtime_checkable
class SumAggregator(Protocol):
    """An aggregator that reads the weighted mean of the updates, and their norms at most.

    One that reads norms says so in an attribute ``individual``: no norm is known of secure sums.
    """

    weighting: Weighting

    def __call__(self, params: Tensors, total: ReplySum, /) -> dict[str, Tensor]:
        """Return Delta."""


Aggregator = ReplyAggregator | SumAggregator


class ServerOptimizer(Protocol):
    """Turns the aggregate Delta into new params; may have ``coupled_state``, as a ServerSide."""

    def init(self, params: Tensors) -> None:
        """Start from the initial params."""

    def step(self, params: Tensors, update: Tensors, cohort: Cohort) -> dict[str, Tensor]:
        """Return the params after one step along ``update``."""

    def state_dict(self) -> Payloads:
        """Return everything that must survive a restart."""

    def load_state_dict(self, state: Payloads) -> None:
        """Restore what ``state_dict`` returned."""


class Output(Protocol):
    """The model that a round evaluates and stores; training continues from x."""

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> Tensors:
        """Return the trainable shared tensors of the output model from x, Delta and the new x."""


@runtime_checkable
class ReadsNoReply(Protocol):
    """An output that reads x, Delta and the new x, and no reply."""

    reads_no_reply: Literal[True]


class ClientSampler(Protocol):
    """Chooses the cohort; a pure function of its seed, the round and the number of clients."""

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""
