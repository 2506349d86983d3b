"""The interface of a method: the one file that a method's author must read.

A method adds any number of :class:`ClientSide` and :class:`ServerSide` parts, and may replace
slots: the aggregator, server optimiser, output, sampler and local optimizer.

Sign convention: ``update_i = y_i - x`` and ``x <- x + eta_g * Delta``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import cached_property
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]  # by parameter (or statistic) name
Payloads = Mapping[str, Tensors]  # by payload name
Shapes = Mapping[str, Mapping[str, tuple[int | None, ...]]]  # None: not known beforehand
Batch = tuple[Tensor, Tensor]  # inputs (B, ...), labels (B,)
# What a local step is made of: it draws batches; puts the gradient of the local objective into
# ``.grad`` and returns the loss; and, once a step, lets the sides edit ``.grad`` and then clips it.
NextBatch = Callable[[], Batch]
Backward = Callable[[Batch], Tensor]
Correct = Callable[[], None]
Weighting = Literal["examples", "clients"]  # clients weigh n_i, or all the same

STATE_LOST = "state-lost"  # a reply's metric: the client has lost the state it had


class Reads(Flag):
    """What a part reads from a round's replies, and what a mode allows parts to read."""

    SUM = auto()  # the weighted sum of the updates, and the sums of the payloads
    STEPS = auto()  # the sum, as how far the clients moved
    NORMS = auto()  # the norm of every update
    REPLIES = auto()  # every reply's tensors; the server then keeps them
    MODELS = auto()  # every client's model y_i = x + update
    ALL = SUM | STEPS | NORMS | REPLIES | MODELS


class RefusedReplyError(Exception):
    """A reply is invalid, so the round ignores it; the message says why."""


class ClientData(Protocol):
    """The examples of one client, on its device."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the task."""

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
class Norms:
    """L2 norms of what a client sent: of each tensor of the update, and of each whole payload."""

    update: Mapping[str, float] = field(default_factory=dict)
    payloads: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One client's valid reply of a round."""

    client_id: int  # the partition id
    num_examples: int  # n_i, training examples
    num_steps: int  # K, optimiser steps
    lr_sum: float  # sum of the step sizes taken: K * eta_l when eta_l is constant
    update: Tensors  # y_i - x of every trainable shared tensor
    payloads: Payloads = field(default_factory=dict)  # of the client sides
    metrics: Mapping[str, float] = field(default_factory=dict)  # that the client measured
    buffers: Tensors = field(default_factory=dict)  # y_i - x of shared floating-point buffers
    per_example: frozenset[str] = frozenset()  # payloads that are sums over the client's examples
    norms: Norms = Norms()

    @property
    def norm(self) -> float:
        """The L2 norm of the update, all tensors as one vector."""
        return math.sqrt(math.fsum(norm**2 for norm in self.norms.update.values()))


@dataclass(frozen=True)
class ReplySum:
    """The sum of a round's valid replies, the same bits in whatever order they came.

    A method whose parts read nothing else runs in memory that does not grow with the cohort.
    """

    replies: Sequence[Reply]  # by client id, without their tensors but with their norms
    # w_i of their updates, as the aggregator weighs them; their sum is 1, less if some are stale
    weights: Sequence[float]
    update: Tensors  # sum_i w_i u_i
    payloads: Payloads  # the sums of the payloads
    buffers: Tensors  # the means of the buffers, weighted by n_i, less if some are stale
    rounding: float = 0.0  # clients have rounded their numbers to multiples of it; 0: they have not


@dataclass(frozen=True)
class Cohort:
    """The round t (from 1), the number of valid replies |S| and the number of clients N.

    If ``summed``, the server knows only the sum, and each reply is a copy of the mean. If
    ``robust``, the aggregator expects some replies to be lies.
    """

    round: int
    size: int
    num_clients: int
    summed: bool = False
    robust: bool = False


@dataclass(frozen=True)
class LocalSummary:
    """What local training did."""

    num_examples: int  # n_i
    num_steps: int  # K
    lr_sum: float  # sum of the step sizes taken
    lr_sums: Mapping[str, float] = field(default_factory=dict)  # by tensor: phases leave some out
    # how far gradients of 1 would have moved each tensor: with momentum, further
    reaches: Mapping[str, float] = field(default_factory=dict)

    def lr_sum_of(self, name: str) -> float:
        """Return the sum of the step sizes that a tensor took."""
        return self.lr_sums.get(name, self.lr_sum)

    def reach_of(self, name: str) -> float:
        """Return how far gradients of 1 would have moved a tensor."""
        return self.reaches.get(name, self.lr_sum_of(name))


@dataclass
class LocalContext:
    """What a client side sees during one round of local training."""

    model: nn.Module  # y_i, in training; ``forward`` returns (features, logits)
    loaded: Tensors  # the whole state as it was put into the model; nobody writes to it
    shared: Collection[str]  # names of the tensors that travel
    received: Payloads  # of the server sides
    state: MutableMapping[str, Tensors]  # the client state; it survives rounds and is never sent
    data: ClientData  # the client's training examples
    loss: Callable[[Tensor, Tensor], Tensor]  # mean task loss of (logits, labels), a scalar
    round: int  # t, from 1
    batch_size: int
    lr: float  # eta_l of this round
    # for random draws of a side; independent of the order of the batches
    generator: torch.Generator = field(default_factory=torch.Generator, init=False)
    # takes the steps; a side may steer one that it knows
    optimizer: LocalOptimizer | None = field(default=None, init=False)
    params: Tensors = field(init=False)  # the model's trainable tensors by name, live
    num_steps: int = field(default=0, init=False)  # k, the steps taken
    first_pass: bool = field(default=True, init=False)  # at y_k, the first gradient of the step
    _measured: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False)
    _received: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Find the trained tensors."""
        self.params = dict(self.model.named_parameters())

    @cached_property
    def received_state(self) -> Tensors:
        """The whole state as received, laid out as the model is; nobody writes to it."""
        return laid_out(self.loaded, self.model.state_dict())

    @cached_property
    def anchor(self) -> Tensors:
        """x: the trainable shared tensors of ``received_state``."""
        return {name: self.received_state[name] for name in self.shared if name in self.params}

    @cached_property
    def start(self) -> Tensors:
        """y_0: x, unless the client or a ``begin`` moved the model."""
        return self.anchor

    def start_here(self) -> None:
        """Take the current model as y_0."""
        self.start = {name: param.detach().clone() for name, param in self.params.items()}

    @property
    def num_classes(self) -> int:
        """Number of classes of the task."""
        return self.data.num_classes

    @cached_property
    def global_model(self) -> nn.Module:
        """The received model: frozen, in eval mode, built once for all sides."""
        model = copy.deepcopy(self.model)
        # not strict: a tensor that layers share has one name, and sets them all
        model.load_state_dict(dict(self.received_state), strict=False)
        return model.requires_grad_(False).eval()

    @torch.no_grad()
    def received_features(self, inputs: Tensor) -> Tensor:
        """Return the received model's features (B, d) of a batch, computed once a batch."""
        if self._received is None or self._received[0] is not inputs:
            self._received = (inputs, self.global_model(inputs)[0])
        return self._received[1]

    def measure(self, name: str, value: Tensor) -> None:
        """Add a scalar to the mean over steps that the reply reports as the metric ``name``.

        Only the first pass of a step, at y_k, counts. The scalar stays on its device until
        training ends, so no step waits for it.
        """
        if not self.first_pass:
            return
        single = value.detach().float()  # autocast leaves few digits
        total, count = self._measured.get(name, (torch.zeros_like(single), 0))
        self._measured[name] = (total + single, count + 1)

    def measurements(self) -> dict[str, float]:
        """Return the means of all measured scalars, by name."""
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


class LocalOptimizer:
    """Takes local steps; started afresh every round."""

    # of the ``stateful`` tensors; None if a step is not a sum of gradients (Adam)
    momentum: float | None

    @property
    def batches_per_step(self) -> int:
        """How many batches a step draws."""
        return 1

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with step size ``lr``."""
        raise NotImplementedError

    def step(self, next_batch: NextBatch, backward: Backward, correct: Correct) -> Tensor:
        """Take one step and return its loss (detached scalar, left on the device)."""
        raise NotImplementedError

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return the named tensors whose step is not plain SGD (momentum, Adam)."""
        return []

    def for_finetuning(self, lr: float) -> tuple[LocalOptimizer, float]:
        """Return what fine-tunes the model before a client scores it, and its step size."""
        return self, lr


class ClientSide:
    """A method's client half; every hook does nothing by default.

    A side may keep values on ``self`` from ``begin`` to ``end``; values that must outlive the
    round go into ``context.state``.
    """

    needs: frozenset[str] = frozenset()  # payloads that the server must broadcast
    sends: frozenset[str] = frozenset()  # payloads that ``end`` returns or ``upload`` adds
    # what it moves by plain SGD steps of the round's step size, whatever the local optimizer is
    plain_steps: str = ""
    # the sent payloads that are sums over the client's examples
    per_example: frozenset[str] = frozenset()
    # the sent payloads that the side itself clips and adds noise to; the noise's standard deviation
    # over what one example moves, and whether it follows from the seed (a site's policy reads both)
    private: frozenset[str] = frozenset()
    noise_multiplier: float = 0.0
    reproducible_noise: bool = False
    clips: bool = False  # whether ``upload`` clips all payloads that are not ``per_example``
    # names that it gives to ``context.measure``; other numbers are refused
    measures: frozenset[str] = frozenset()
    # of the sent payloads that are neither float32 nor of the model's type
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    # names of the tensors in its payloads that count examples: the server refuses a reply in which
    # one is not a whole number from 0 to n_i
    counts: frozenset[str] = frozenset()
    # payloads, sent or needed, that strategy/compression may change as it does updates and models:
    # floats by parameter name, in the parameters' shapes. The server adds up a sent one from round
    # to round, and names it in ``expected``. Statistics do not qualify
    compressible: frozenset[str] = frozenset()
    by_class: bool = False  # whether it works by class, and so needs classification
    moves_start: bool = False  # whether ``begin`` may let the client start elsewhere than at x
    # keys of the client state from which, with the model, ``own_model`` can be made: then
    # fedhet-evaluate and fedhet-export make it after the run, with the shared model in place of
    # y_i. If empty, ``own_model`` exists only right after training
    own_state: frozenset[str] = frozenset()

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse, before round 1, a model or optimizer that this side cannot work with.

        ``shared`` names the trainable tensors that are sent; the others are personal.
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

    def own_model(self, context: LocalContext) -> Tensors:
        """Return the tensors in which the client's own model differs from y_i; after ``end``."""
        return {}

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply to send instead, such as clipped and with noise; called last.

        ``received`` are the server's payloads, ``seed`` belongs to run, round and client.
        """
        return reply

    def after_sending(self, reply: Reply, state: dict[str, Tensors]) -> None:
        """Adapt the client state to the sent reply; called last, if ``end`` knew another reply.

        This happens if a side ``clips``, or a codec rounds and keeps no residual. ``reply`` is what
        the server reads, ``state`` what the client keeps from this round.
        """


class ServerPart:
    """A part of the server's step with a state: a server side, optimizer or robust aggregator."""

    # names of its attributes, each tensors by name, that must survive a restart
    kept: tuple[str, ...] = ()
    # keys of the client state from which its state is computed, as c from all c_i. When a client
    # loses its state, ``init`` is called again and all clients drop these keys. This happens once
    # per client: if it loses its state again, its replies are rejected
    coupled_state: frozenset[str] = frozenset()

    def init(self, params: Tensors) -> None:
        """Start from the initial trainable shared tensors."""

    def state_dict(self) -> Payloads:
        """Return everything that must survive a restart, as named groups of tensors."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore what ``state_dict`` returned."""
        for name in self.kept:
            setattr(self, name, dict(state.get(name, {})))


class ServerSide(ServerPart):
    """A method's server half; every hook does nothing by default."""

    needs: frozenset[str] = frozenset()  # payloads that the clients must send
    sends: frozenset[str] = frozenset()  # payloads that ``broadcast`` returns
    # payloads that ``receive`` adds to the replies, to be summed with the others
    adds: frozenset[str] = frozenset()
    # what it reads of the replies; Reads.REPLIES by default if it overrides ``receive``. If no part
    # reads replies, the server adds up each one and frees it
    reads: Reads = Reads.SUM
    # what the other parts may read after ``release``. If that is only the sum, the sum has noise,
    # and nobody takes the place of a client that is not connected
    leaves: Reads = Reads.ALL

    def __init_subclass__(cls) -> None:
        """Keep the replies for a side that overrides ``receive``, unless the side says
        otherwise."""
        super().__init_subclass__()
        if "receive" in cls.__dict__ and "reads" not in cls.__dict__:
            cls.reads = Reads.REPLIES

    def broadcast(self, client_id: int) -> Payloads:
        """Return the payloads named in ``sends`` for one client."""
        return {}

    def asked(self, client_id: int) -> None:
        """Note that a client is sent a message to train; ``broadcast`` also sizes messages."""

    def expected(self) -> Shapes:
        """Return the names and shapes that a reply's payloads must have, if known."""
        return {}

    def check(self, reply: Reply) -> None:
        """Raise RefusedReplyError for invalid payloads (NaN, Inf, ``expected`` are checked)."""

    def receive(self, params: Tensors, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Return the replies to add up instead; called with all of them if they are kept."""
        return replies

    def release(self, total: ReplySum) -> ReplySum:
        """Return the sum that all parts read instead."""
        return total

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """Update the state from the sum of the valid replies and the aggregate Delta."""

    def metrics(self) -> Mapping[str, float]:
        """Return scalars to report of the finished round, by name."""
        return {}


# ---- arithmetic by tensor name -------------------------------------------------------------------


def zeros_like(tensors: Tensors) -> dict[str, Tensor]:
    """Return zero tensors of the same names and shapes."""
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def laid_out(tensors: Tensors, like: Tensors) -> dict[str, Tensor]:
    """Return the tensors in the layout and on the device of ``like``, copied where they differ."""
    return {
        name: value
        if value.stride() == like[name].stride() and value.device == like[name].device
        else torch.empty_like(like[name]).copy_(value)
        for name, value in tensors.items()
    }


def subtract(left: Tensors, right: Tensors) -> dict[str, Tensor]:
    """Return ``left - right`` by name."""
    return {name: value - right[name] for name, value in left.items()}


def local_model(params: Tensors, reply: Reply) -> dict[str, Tensor]:
    """Return a client's model ``y_i = x + update_i`` by name."""
    return {name: x + reply.update[name] for name, x in params.items()}
