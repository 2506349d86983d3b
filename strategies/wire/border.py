"""The border: the one door through which replies leave a client and enter the server.

    encode(reply, ...) -> RecordDict                 at the client
    decode(message, client_id, expected) -> Reply    at the server

A site may send anything, so every reply is checked here before it is used. ``decode`` returns
values of known names, types, shapes and ranges, or raises RefusedReplyError, which says why. It
reads only an array's bytes, and ignores the type and shape that the array claims.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedhet.common.metrics import in_range, range_text
from fedhet.strategies.base import STATE_LOST, RefusedReplyError, Reply, Tensors
from fedhet.strategies.wire.compressed_records import decode_compressed, reply_records
from fedhet.strategies.wire.compression import Compression
from fedhet.strategies.wire.records import (
    CLIENT,
    METRICS,
    PERSONAL_SCORE,
    UPDATE,
    NonFiniteReplyError,
    record_in,
    to_metrics,
)
from fedhet.strategies.wire.tensor_decoder import decode_tensors, printable

_LARGEST = torch.finfo(torch.float32).max  # of a number among the metrics
_MOST_CLIENTS = 10_000_000
_MOST_EXAMPLES = 1 << 48
_WHOLE = frozenset({"partition-id", "num-examples", "num-steps", STATE_LOST})
_REQUIRED = frozenset({"partition-id", "num-examples", "num-steps", "lr-sum"})
_MEASURED = _REQUIRED | {
    "train-loss",
    "received-loss",
    "received-accuracy",
    "penalty",
    "penalty-share",
    "fit-seconds",
    STATE_LOST,
    *(f"{PERSONAL_SCORE}{name}" for name in ("accuracy", "test-loss", "test-accuracy")),
}
_EVALUATED = frozenset({"partition-id", "num-examples", "loss", "accuracy"})


# ---- replies to train messages -------------------------------------------------------------------


@dataclass(frozen=True)
class Sender:
    """What one client was told, and the limits of its reply; None: not checked."""

    lr: float | None = None  # eta_l that it was told
    round: int = 0  # t that it was told
    max_examples: int | None = None  # how many examples it registered
    max_steps: int | None = None  # how many steps the recipe allows
    not_lost: str | None = None  # why it cannot have lost its state


@dataclass(frozen=True)
class Bounds:
    """The range of the numbers in a reply."""

    largest: float = math.inf  # the most that a number's size may be
    # the same for a number of an update times the client's examples, its possible weight. So a
    # client that claims too many examples narrows only its own numbers
    summand: float = math.inf
    widest: int = 1 << 16  # the longest that an open dimension of a payload may be


@dataclass(frozen=True)
class ExpectedPayload:
    """One payload of a reply."""

    # of its tensors by name; None: the names are free
    shapes: Mapping[str, tuple[int | None, ...]] | None = None
    dtype: torch.dtype | None = None  # if it is neither float32 nor the model's type
    per_example: bool = False  # whether it is a sum over the client's examples
    compressed: bool = False  # whether it travels compressed
    # names of its tensors that count examples: whole numbers from 0 to n_i
    counts: Collection[str] = ()


@dataclass(frozen=True)
class Expected:
    """What the replies of a round must look like."""

    shared: Tensors  # the tensors that were sent, buffers included; only shapes and types count
    senders: Mapping[int, Sender]  # the clients that may answer, by id
    buffers: Collection[str] = ()  # names of the buffers among the shared tensors
    # that the client sides send, by name
    payloads: Mapping[str, ExpectedPayload] = field(default_factory=dict)
    # names of the numbers that the client sides measure; None: see decode_metrics
    measures: Collection[str] | None = ()
    bounds: Bounds = Bounds()  # of the numbers
    compression: Compression = field(default_factory=Compression)  # of what the clients send
    untrained: Collection[str] = ()  # shared tensors that clients do not send: their update is 0

    @cached_property
    def sent(self) -> dict[str, Tensor]:
        """The shared tensors that a client sends."""
        return {name: value for name, value in self.shared.items() if name not in self.untrained}

    @cached_property
    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """The shapes of the tensors that a client sends."""
        return {name: tuple(value.shape) for name, value in self.sent.items()}

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The model's types, and float32, in which statistics and secure sums are."""
        return {torch.float32, *(value.dtype for value in self.shared.values())}

    @cached_property
    def metrics(self) -> set[str] | None:
        """The names that a reply's numbers may have; None: any."""
        return None if self.measures is None else {*_MEASURED, *self.measures}

    @cached_property
    def per_example(self) -> frozenset[str]:
        """The payloads that are sums over a client's examples."""
        return frozenset(name for name, one in self.payloads.items() if one.per_example)


def encode(
    reply: Reply,
    compression: Compression,
    payloads: Collection[str],
    round: int,
    state: MutableMapping[str, Any],
) -> RecordDict:
    """Return the content of a client's reply; see :func:`~.compressed_records.reply_records`."""
    content = reply_records(reply, compression, payloads, round, state)
    content[METRICS] = to_metrics(reply.metrics)
    return content


def decode(message: Message, client_id: int, expected: Expected) -> Reply:
    """Return the reply of the client that must have sent this message.

    Raises:
        RefusedReplyError: says why.
    """
    content = content_of(message)
    wanted = {UPDATE, METRICS, *expected.payloads}
    if unknown := sorted(printable(name) for name in content.keys() - wanted):
        raise RefusedReplyError(f"it has the unknown records {unknown[:5]}")
    metrics = _decode_counts(content, client_id, expected)
    bounds, buffers = expected.bounds, frozenset(expected.buffers)
    largest = min(bounds.largest, bounds.summand / metrics["num-examples"])
    update = _decode_update(content, client_id, expected, largest)
    if expected.untrained:
        update = {
            name: update[name] if name in update else torch.zeros_like(value, device="cpu")
            for name, value in expected.shared.items()
        }
    payloads = {
        name: _decode_payload(content, client_id, name, expected)
        for name in sorted(expected.payloads)
    }
    for name, payload in payloads.items():
        for count in payload.keys() & set(expected.payloads[name].counts):
            _check_counts(f"payload {name!r}", count, payload[count], metrics["num-examples"])
    return Reply(
        client_id=client_id,
        num_examples=int(metrics["num-examples"]),
        num_steps=int(metrics["num-steps"]),
        lr_sum=metrics["lr-sum"],
        update={name: value for name, value in update.items() if name not in buffers},
        buffers={name: value for name, value in update.items() if name in buffers},
        payloads=payloads,
        metrics=metrics,
        per_example=expected.per_example,
    )


def _decode_counts(content: RecordDict, client_id: int, expected: Expected) -> dict[str, float]:
    """Return a reply's numbers; refuse what the client cannot have done."""
    sender = expected.senders[client_id]
    metrics = decode_metrics(content, _REQUIRED, expected.metrics)
    _check_sender(metrics, client_id, sender.max_examples)
    steps, lr_sum = metrics["num-steps"], metrics["lr-sum"]
    if steps < 1:
        raise RefusedReplyError("it took no step")
    if (seconds := metrics.get("fit-seconds", 0.0)) < 0:
        raise RefusedReplyError(f"its fit-seconds are {seconds:g}")
    if sender.max_steps is not None and steps > sender.max_steps:
        raise RefusedReplyError(f"it counts {steps:g} steps, and the recipe has {sender.max_steps}")
    # one step at least and all of them at most: methods divide by it
    lr = sender.lr
    least, most = (0.0, math.inf) if lr is None else (lr, steps * lr)
    if not least * (1 - 1e-6) <= lr_sum <= most * (1 + 1e-6):
        raise RefusedReplyError(
            f"its lr-sum is {lr_sum:g}: it must be from {least:g} to {most:g}, the step size "
            f"times 1 to {steps:g} steps"
        )
    if metrics.get(STATE_LOST) and sender.not_lost is not None:
        raise RefusedReplyError(f"it says that it has lost its state, {sender.not_lost}")
    return metrics


def _check_sender(metrics: Mapping[str, float], client_id: int, max_examples: int | None) -> None:
    if metrics["partition-id"] != client_id:
        raise RefusedReplyError(f"it names partition {metrics['partition-id']:g}")
    examples = metrics["num-examples"]
    if max_examples is not None and examples > max_examples:
        raise RefusedReplyError(
            f"it counts {examples:g} examples and has registered {max_examples}"
        )


def _check_counts(what: str, name: str, counts: Tensor, num_examples: float) -> None:
    if counts.numel() and not bool(((counts == counts.round()) & (counts >= 0)).all()):
        raise RefusedReplyError(f"{what}: its {name} are not all whole numbers from 0 on")
    if counts.numel() and float(counts.max()) > num_examples:
        raise RefusedReplyError(
            f"{what}: its {name} reach {float(counts.max()):g} of its {num_examples:g} examples"
        )


def _decode_update(
    content: RecordDict, client_id: int, expected: Expected, largest: float
) -> dict[str, Tensor]:
    record = record_in(content, UPDATE, ArrayRecord)
    if expected.compression.up is None:
        return decode_tensors(UPDATE, record, expected.shapes, expected.dtypes, largest=largest)
    full = {name: value for name, value in expected.sent.items() if name in expected.buffers}
    trained = {name: value for name, value in expected.sent.items() if name not in full}
    return _decompressed(content, UPDATE, client_id, expected, trained, full, largest)


def _decode_payload(
    content: RecordDict, client_id: int, name: str, expected: Expected
) -> dict[str, Tensor]:
    one, bounds = expected.payloads[name], expected.bounds
    if one.compressed and expected.compression.up is not None:
        own = {key: value.dtype for key, value in expected.shared.items()}
        tensors = {
            key: torch.empty(
                [n for n in shape if n is not None],  # all are known: see compressed_shapes
                dtype=own.get(key, torch.float32),
                device="meta",
            )
            for key, shape in (one.shapes or {}).items()
        }
        return _decompressed(content, name, client_id, expected, tensors, {}, bounds.largest)
    record = record_in(content, name, ArrayRecord)
    what = name if record is None else f"payload {name!r}"
    dtypes = expected.dtypes if one.dtype is None else {one.dtype}
    return decode_tensors(what, record, one.shapes, dtypes, bounds.widest, bounds.largest)


def _decompressed(
    content: RecordDict,
    name: str,
    client_id: int,
    expected: Expected,
    tensors: Tensors,
    full: Tensors,
    largest: float,
) -> dict[str, Tensor]:
    record, codec = record_in(content, name, ArrayRecord), expected.compression.up
    assert codec is not None
    what = name if record is None or name == UPDATE else f"payload {name!r}"
    seed = expected.compression.draws(name, expected.senders[client_id].round, client_id + 1)
    return decode_compressed(what, record, codec, seed, tensors, full, largest)


def content_of(message: Message) -> RecordDict:
    """Return a reply's content; refuse an error."""
    if message.has_error():
        error = message.error
        raise RefusedReplyError(f"error {error.code}: {printable(error.reason)}")
    return message.content


# ---- the range of numbers ------------------------------------------------------------------------


def largest_of(params: Tensors, num_clients: int) -> float:
    """Return the size of number up to which float32 holds all clients' sum of squares.

    It is sqrt(3.4e38 / (N d)), with d numbers in the model, or in a square of its widest layer:
    1e14 for a thousand clients and a model of 25 million parameters.
    """
    numbers = max(sum(value.numel() for value in params.values()), widest_of(params) ** 2)
    return math.sqrt(_LARGEST / (max(num_clients, 1) * numbers))


def widest_of(params: Tensors) -> int:
    """Return the longest side of the tensors, each as a matrix (outputs, inputs and a bias)."""
    sides = ((x.shape[0], math.prod(x.shape[1:]) + 1) for x in params.values() if x.dim() > 0)
    return max((length for pair in sides for length in pair), default=1 << 16)


# ---- numbers -------------------------------------------------------------------------------------


def decode_metrics(
    content: RecordDict, required: Collection[str], allowed: Collection[str] | None
) -> dict[str, float]:
    """Return a reply's numbers; refuse missing and unknown names, and what is out of range.

    With ``allowed`` None the server made the reply itself: any name may occur, with rounding
    errors.
    """
    record = record_in(content, METRICS, MetricRecord) or MetricRecord()
    if missing := sorted(set(required) - record.keys()):
        raise RefusedReplyError(f"its metrics lack {missing}")
    if allowed is not None and (more := record.keys() - allowed):
        unknown = sorted(map(printable, more))
        raise RefusedReplyError(f"a client may not send its metrics {unknown[:5]}")
    found = {}
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RefusedReplyError(f"its metric {name!r} is not a number")
        if not abs(value) <= _LARGEST:
            raise NonFiniteReplyError(
                f"its metrics [{name!r}] are NaN or Inf, or too large (NaN in its data, or a step "
                "size that is too large)"
            )
        if allowed is not None and not in_range(name, value):
            raise RefusedReplyError(f"its metric {name}={value:g} is not in {range_text(name)}")
        if allowed is not None and name in _WHOLE and value != int(value):
            raise RefusedReplyError(f"its {name} is {value:g}: it must be a whole number")
        found[name] = float(value)
    if found["num-examples"] < 1:
        raise RefusedReplyError("it has no example")
    return found


# ---- registration, evaluation --------------------------------------------------------------------


@dataclass(frozen=True)
class NodeInfo:
    """A node's answer to the registration."""

    partition_id: int  # which client it plays, from 0
    num_partitions: int  # how many clients its config speaks of
    num_examples: int  # that it trains on; 0 under secure aggregation
    num_held_out: int  # that it evaluates on; 0 if none are held out
    texts: Mapping[str, str]  # hashes of recipe and code, and versions, by name


_RANGES = {  # of the registration's numbers
    "partition-id": (0, _MOST_CLIENTS - 1),
    "num-partitions": (1, _MOST_CLIENTS),
    "num-examples": (0, _MOST_EXAMPLES),
    "num-held-out": (0, _MOST_EXAMPLES),
}


def decode_node_info(message: Message) -> NodeInfo:
    """Return a node's answer to the registration."""
    if message.has_error():
        raise RefusedReplyError(f"cannot take part: {printable(message.error.reason)}")
    record = message.content.config_records.get(CLIENT, ConfigRecord())
    numbers = {}
    for name, (low, high) in _RANGES.items():
        value = record.get(name, 0 if name == "num-held-out" else None)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            shown = "is missing" if value is None else f"is {printable(repr(value))}"
            raise RefusedReplyError(
                f"its {name} {shown}: it must be a whole number from {low} to {high} (set "
                "partition-id and num-partitions in --node-config)"
            )
        numbers[name.replace("-", "_")] = value
    rest = {name: value for name, value in record.items() if name not in _RANGES}
    texts = {printable(name): printable(value) for name, value in rest.items()}
    return NodeInfo(**numbers, texts=texts)


def decode_evaluation(
    message: Message, client_id: int, max_examples: int, metrics: Collection[str] = ()
) -> dict[str, float]:
    """Return a client's numbers of an evaluation: accuracy, loss and ``metrics``."""
    content = content_of(message)
    if unknown := sorted(printable(name) for name in content.keys() - {METRICS}):
        raise RefusedReplyError(f"it has the unknown records {unknown[:5]}")
    metrics = decode_metrics(content, {"partition-id", "num-examples"}, {*_EVALUATED, *metrics})
    _check_sender(metrics, client_id, max_examples)
    return metrics
