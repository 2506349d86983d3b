"""The interface that every method is written against; the one file a method's author must read.

What *adds* is a set: any number of :class:`ClientSide` and :class:`ServerSide` parts.
What *replaces* is a slot: one aggregator, server optimiser, output, sampler and local
optimizer.

One sign convention holds everywhere: ``update_i = y_i - x`` and ``x <- x + eta_g * Delta``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import ConfigError

Tensors = Mapping[str, Tensor]  # by parameter (or statistic) name
Payloads = Mapping[str, Tensors]  # by payload name
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]  # by payload name, then tensor name
Batch = tuple[Tensor, Tensor]  # inputs (B, ...), labels (B,)
Weighting = Literal["examples", "clients"]  # how clients count in a mean: by n_i, or all the same


STATE_LOST = "state-lost"  # among a reply's metrics: the client had a state, and has it no more
RESERVED_RECORDS = frozenset({"params", "config", "update", "metrics", "client"})


class RefusedReplyError(Exception):
    """A reply that is left out of the round; the message says why."""


class ClientData(Protocol):
    """The examples of one client, on its device."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the task, held by this client or not."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def class_counts(self) -> list[int]:
        """Return the number of examples of each class."""

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        train: bool,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield one pass: shuffled by ``generator`` when given, augmented when ``train``."""


@dataclass(frozen=True)
class Reply:
    """One client's valid answer to a round.

    Attributes:
        client_id: the partition id of the client.
        num_examples: n_i, number of training examples.
        num_steps: K, number of optimiser steps taken.
        lr_sum: sum of the step sizes really taken (K * eta_l when eta_l is constant).
        update: ``y_i - x`` for every trainable shared tensor.
        buffers: ``y_i - x`` for every shared floating-point buffer (BatchNorm statistics).
        payloads: what the client's sides sent, by payload name.
        per_example: those of the payloads that are sums over the client's examples.
        metrics: scalars that the client measured.
    """

    client_id: int
    num_examples: int
    num_steps: int
    lr_sum: float
    update: Tensors
    payloads: Payloads = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    per_example: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cohort:
    """The round (t, from 1), the number of valid replies |S| and the num_clients N."""

    round: int
    size: int
    num_clients: int


@dataclass(frozen=True)
class LocalSummary:
    """What local training did: n_i, K and the sum of the step sizes taken.

    ``lr_sums`` has that sum of each trainable tensor, where phases of training leave some out;
    ``reaches`` how far gradients of 1 would have moved it: with momentum that is further.
    """

    num_examples: int
    num_steps: int
    lr_sum: float
    lr_sums: Mapping[str, float] = field(default_factory=dict)
    reaches: Mapping[str, float] = field(default_factory=dict)

    def lr_sum_of(self, name: str) -> float:
        """Return the sum of the step sizes that a tensor took."""
        return self.lr_sums.get(name, self.lr_sum)

    def reach_of(self, name: str) -> float:
        """Return how far gradients of 1 would have moved a tensor."""
        return self.reaches.get(name, self.lr_sum_of(name))


@dataclass
class LocalContext:
    """Everything a client side may see during one round of local training.

    Attributes:
        model: the local model y_i, in training; ``forward`` returns (features, logits).
        received_state: the model's whole state as received (clones, never written).
        anchor: x, the trainable shared tensors as received (a subset of ``received_state``).
        received: the payloads the server sent this client, by payload name.
        state: the client state; it survives rounds and never travels.
        data: the client's training examples.
        loss: mean task loss of (logits, labels), a scalar.
        round: t, from 1.
        batch_size: the local batch size.
        generator: for what a side draws; the order of the batches does not depend on it.
        num_steps: k, how many steps have been taken.
        first_pass: whether the optimizer asks for the first gradient of this step, which is at y_k.
        start: y_0 by name. It is x, unless the client or a side's ``begin`` has moved the model.
    """

    model: nn.Module
    received_state: Tensors
    anchor: Tensors
    received: Payloads
    state: MutableMapping[str, Tensors]
    data: ClientData
    loss: Callable[[Tensor, Tensor], Tensor]
    round: int
    batch_size: int
    generator: torch.Generator = field(default_factory=torch.Generator)
    num_steps: int = field(default=0, init=False)
    first_pass: bool = field(default=True, init=False)
    start: Tensors = field(init=False)
    _measured: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False)
    _received: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Start at x."""
        self.start = self.anchor

    def start_here(self) -> None:
        """Take the model as it is for y_0."""
        self.start = {name: param.detach().clone() for name, param in self.params.items()}

    @property
    def num_classes(self) -> int:
        """Number of classes of the task."""
        return self.data.num_classes

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """The local model's trainable tensors by name, live."""
        return dict(self.model.named_parameters())

    @cached_property
    def global_model(self) -> nn.Module:
        """The model as received: frozen, in eval mode, made once and shared by all sides."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(dict(self.received_state), strict=True)
        return model.requires_grad_(False).eval()

    @torch.no_grad()
    def received_features(self, inputs: Tensor) -> Tensor:
        """Return the features (B, d) that the model as received makes of a batch.

        Computed once for a batch, however many sides and passes of a optimizer ask for them.
        """
        if self._received is None or self._received[0] is not inputs:
            self._received = (inputs, self.global_model(inputs)[0])
        return self._received[1]

    def measure(self, name: str, value: Tensor) -> None:
        """Take a scalar into the mean of ``name`` that the client's reply reports as a metric.

        A mean over steps: what a optimizer's further passes of a step give, elsewhere than at y_k,
        does not count. It stays on its device until training has ended: no step waits for it.
        """
        if not self.first_pass:
            return
        single = value.detach().float()  # under autocast it may have few digits
        total, count = self._measured.get(name, (torch.zeros_like(single), 0))
        self._measured[name] = (total + single, count + 1)

    def measurements(self) -> dict[str, float]:
        """Return the means of what was measured, by name."""
        return {name: float(total) / count for name, (total, count) in self._measured.items()}


@dataclass(frozen=True)
class Step:
    """One mini-batch: params by name, features (B, d) and logits (B, C) of the local model."""

    params: Tensors
    inputs: Tensor
    labels: Tensor
    features: Tensor
    logits: Tensor
    context: LocalContext


class LocalOptimizer(Protocol):
    """Takes local steps. A fresh one is started every round, so its state never leaks."""

    @property
    def momentum(self) -> float | None:
        """By which a gradient goes on moving the ``stateful`` tensors in later steps.

        None: their steps are no sum of gradients (Adam).
        """

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""

    def step(
        self,
        next_batch: Callable[[], Batch],
        backward: Callable[[Batch], Tensor],
        correct: Callable[[], None],
    ) -> Tensor:
        """Take one step and return its loss (detached scalar, left on the device).

        Args:
            next_batch: draws a mini-batch.
            backward: puts the gradient of the local objective into ``.grad``; returns the loss.
            correct: lets the sides edit ``.grad``, then clips it. Called once a step.
        """

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return those of the named tensors whose step is not plain SGD (momentum, Adam)."""


class ClientSide:
    """A method's client half: five hooks, each a no-op by default.

    ``needs`` are payloads the server must broadcast, ``sends`` payloads that ``end`` returns (or
    ``upload`` adds), ``per_example`` those of them that are sums over the client's examples and so
    grow with their number, ``private`` those that the side itself clips and adds noise to. With
    ``clips``, ``upload`` covers all payloads that are not ``per_example``.
    A side may keep what ``begin`` computed on ``self`` until ``end``; what must outlive the round
    goes into ``context.state``.
    """

    needs: frozenset[str] = frozenset()
    sends: frozenset[str] = frozenset()
    per_example: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    clips: bool = False

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse, before round 1, a model or optimizer this side cannot work with.

        Args:
            model: the client's.
            optimizer: takes the local steps.
            shared: the trainable tensors that travel; the others are personal.
        """

    def begin(self, context: LocalContext) -> None:
        """Prepare for local training."""

    def penalty(self, step: Step) -> Tensor | None:
        """Return a scalar to add to the task loss, or None."""
        return None

    def correct(self, grads: Tensors, context: LocalContext) -> None:
        """Edit gradients in place, after backward and before the optimiser."""

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Write the client state and return the payloads named in ``sends``."""
        return {}

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return what the client sends in place of ``reply``: clipped, with noise.

        Called last, after every side's ``end``.

        Args:
            reply: all that the client would send.
            received: the payloads that the server sent.
            seed: for what is drawn; of the run, the round and the client.
        """
        return reply


class ServerSide:
    """A method's server half.

    ``additive_payloads`` are the payloads of which ``receive`` and ``reduce`` read the sum over the
    clients, and nothing else of a single reply: they must do the same when each reply is
    replaced by the mean of all. None (the default): they read single replies, if at all.
    With ``averages`` it is ``receive`` that gives every client the mean of all, so that no other
    part may read single replies.
    ``coupled_state`` are the keys of the client state that the side's own state is made of, such as
    c of all c_i. When a client has lost its state, ``init`` is called again, and all clients drop
    theirs.
    """

    needs: frozenset[str] = frozenset()
    sends: frozenset[str] = frozenset()
    coupled_state: frozenset[str] = frozenset()
    additive_payloads: frozenset[str] | None = None
    averages: bool = False

    def init(self, params: Tensors) -> None:
        """Start from the initial trainable shared tensors."""

    def broadcast(self, client_id: int) -> Payloads:
        """Return the payloads named in ``sends`` for one client."""
        return {}

    def expected(self) -> Shapes:
        """Return the tensors, with shapes, that a reply's payloads must hold (if known)."""
        return {}

    def check(self, reply: Reply) -> None:
        """Refuse a reply whose payloads are not what they should be (RefusedReplyError).

        Names and shapes that ``expected`` gives, NaN and Inf are checked before.
        """

    def receive(self, params: Tensors, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Return the replies to aggregate instead; called after the transforms."""
        return replies

    def reduce(self, replies: Sequence[Reply], update: Tensors, cohort: Cohort) -> None:
        """Take in the round: its valid replies (by client id) and the aggregate Delta."""

    def metrics(self) -> Mapping[str, float]:
        """Return scalars to report beside the finished round's, by name."""
        return {}

    def state_dict(self) -> Payloads:
        """Return everything that must survive a restart, as named groups of tensors."""
        return {}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore what ``state_dict`` returned."""


class Aggregator(Protocol):
    """(x, replies) -> Delta, over the trainable shared tensors."""

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate of the replies' updates.

        Changes of buffers may be among it; without, a buffer moves by the clients' mean change.
        """


@runtime_checkable
class MeanAggregator(Protocol):
    """An aggregator that is a weighted mean of the updates: it needs nothing but their sum."""

    weighting: Weighting


class ReplyTransform(Protocol):
    """(x, replies) -> replies: alignment, clipping, compression."""

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Return the replies to aggregate instead."""


class Observer(Protocol):
    """Measures what came in a round, and changes nothing in it."""

    def __call__(self, params: Tensors, replies: Sequence[Reply], cohort: Cohort) -> None:
        """Look at x and the valid replies (by client id), as they came, before any transform."""


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
    """Which model a round gives out: evaluated and stored. What is trained on stays x."""

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> Tensors:
        """Return the trainable shared tensors to give out; ``stepped`` itself gives out x.

        Args:
            params: x as it was sent to the clients.
            update: Delta, what the aggregator made of their replies.
            stepped: the new x, after the server optimiser.
            replies: those replies.
        """


@runtime_checkable
class ReadsNoReply(Protocol):
    """An output that reads x, Delta and the new x, and no reply."""

    reads_no_reply: Literal[True]


class ClientSampler(Protocol):
    """Chooses the cohort; a pure function of its seed, the round and the num_clients."""

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""


class Schedule(Protocol):
    """Learning-rate factor of a round."""

    def __call__(self, round: int, num_rounds: int) -> float:
        """Return the factor for ``round`` in 1..num_rounds."""


def zeros_like(tensors: Tensors) -> dict[str, Tensor]:
    """Return zero tensors of the same names and shapes."""
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def subtract(left: Tensors, right: Tensors) -> dict[str, Tensor]:
    """Return ``left - right`` by name."""
    return {name: value - right[name] for name, value in left.items()}


def local_model(params: Tensors, reply: Reply) -> dict[str, Tensor]:
    """Return a client's model ``y_i = x + update_i`` by name."""
    return {name: x + reply.update[name] for name, x in params.items()}


def check_sides(
    client_sides: Mapping[str, ClientSide],
    server_sides: Mapping[str, ServerSide],
    *,
    allow_stacked_corrections: bool = False,
) -> None:
    """Refuse sides whose payloads do not meet, or whose corrections depend on their order.

    Raises:
        ConfigError: naming the side, the payload and the key.
    """
    broadcast = _all_payloads("server", server_sides)
    sent = _all_payloads("client", client_sides)
    for name, client_side in client_sides.items():
        _require_payloads(f"strategy.client_sides.{name}", client_side.needs, broadcast, "server")
    for name, server_side in server_sides.items():
        _require_payloads(f"strategy.server_sides.{name}", server_side.needs, sent, "client")
    correcting = sorted(
        name for name, side in client_sides.items() if type(side).correct is not ClientSide.correct
    )
    if len(correcting) > 1 and not allow_stacked_corrections:
        raise ConfigError(
            f"client sides {correcting} all correct the gradient, so their order matters; allowed "
            "is one. Drop one from strategy=[...], or set strategy.allow_stacked_corrections=true"
        )


def _all_payloads(
    half: str, sides: Mapping[str, ClientSide] | Mapping[str, ServerSide]
) -> frozenset[str]:
    names = [payload for side in sides.values() for payload in side.sends]
    clashes = sorted({n for n in names if names.count(n) > 1 or n in RESERVED_RECORDS})
    if clashes:
        raise ConfigError(
            f"the payloads {clashes} are sent by two of the {half} sides {sorted(sides)}, or are "
            f"reserved ({sorted(RESERVED_RECORDS)}); drop one from strategy=[...]"
        )
    return frozenset(names)


def _require_payloads(key: str, needs: frozenset[str], offered: frozenset[str], other: str) -> None:
    missing = sorted(needs - offered)
    if missing:
        raise ConfigError(
            f"{key} needs the payloads {missing}, but no {other} side sends them (sent are: "
            f"{sorted(offered)}); add the {other} half to strategy.{other}_sides"
        )
