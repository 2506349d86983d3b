"""The border: everything that a site sends is checked and decoded here, before it is used.

A site may send anything. Each function takes a message or a record and returns values of known
names, types, shapes and ranges, or raises RefusedReplyError, which says why. It reads nothing of an
array but its bytes: what an array says of itself beside them is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedhet.common.metrics import in_range, range_text
from fedhet.strategies.base import (
    STATE_LOST,
    RefusedReplyError,
    Reply,
    Shapes,
    Tensors,
)
from fedhet.strategies.wire.compressed_records import decode_compressed
from fedhet.strategies.wire.compression import Compression
from fedhet.strategies.wire.records import (
    CLIENT,
    METRICS,
    PERSONAL_SCORE,
    UPDATE,
    NonFiniteReplyError,
    record_in,
)
from fedhet.strategies.wire.tensor_decoder import decode_tensors, printable

_LARGEST = torch.finfo(torch.float32).max  # of a number among the metrics
_MOST_CLIENTS = 10_000_000
_MOST_EXAMPLES = 1 << 48
_COUNTS = frozenset({"partition-id", "num-examples", "num-steps", "lr-sum"})
_MEASURED = _COUNTS | {
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


def content_of(message: Message) -> RecordDict:
    """Return a reply's content; refuse an error."""
    if message.has_error():
        error = message.error
        raise RefusedReplyError(f"error {error.code}: {printable(error.reason)}")
    return message.content


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

    ``allowed`` None: the server has made the reply itself, so any name is, and rounding is seen.
    """
    record = record_in(content, METRICS, MetricRecord) or MetricRecord()
    if missing := sorted(set(required) - record.keys()):
        raise RefusedReplyError(f"its metrics lack {missing}")
    if allowed is not None and (more := record.keys() - allowed):
        unknown = sorted(map(printable, more))
        raise RefusedReplyError(f"its metrics {unknown[:5]} are none that a client may send")
    found = {}
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RefusedReplyError(f"its metric {name!r} is no number")
        if not abs(value) <= _LARGEST:
            raise NonFiniteReplyError(
                f"its metrics [{name!r}] are NaN or Inf, or too large (NaN in its data, or a step "
                "size that is too large)"
            )
        if allowed is not None and not in_range(name, value):
            raise RefusedReplyError(f"its metric {name}={value:g} is not in {range_text(name)}")
        found[name] = float(value)
    if found["num-examples"] < 1:
        raise RefusedReplyError("it has no example")
    return found


# ---- replies to train messages -------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedReply:
    """What the replies of a round must be.

    Attributes:
        params: the shared tensors that were sent, buffers included; only shapes and types count.
        buffers: names of the buffers among them.
        payloads: names of the payloads that the client sides send.
        shapes: of these payloads' tensors, where a side declares them.
        dtypes: of payloads that are neither float32 nor of the model's type.
        measures: names of the numbers that the client sides measure; None: see decode_metrics.
        widest: the longest that an open dimension of a payload may be.
        largest: the size that a number may have.
        summand: the same for a number of an update times the client's examples, which may weigh it:
            a client that claims more examples than it has narrows its own numbers alone.
        per_example: names of the payloads that are sums over a client's examples.
        lr: eta_l by client id, that the clients were told; not checked if it is not named.
        compression: of what the clients send.
        compressed: shapes of the payloads' tensors that it compresses.
        rounds: t by client id, that the clients were told; 0 if it is not named.
    """

    params: Tensors
    buffers: Collection[str] = ()
    payloads: Collection[str] = ()
    shapes: Shapes = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    measures: Collection[str] | None = ()
    widest: int = 1 << 16
    largest: float = math.inf
    summand: float = math.inf
    per_example: frozenset[str] = frozenset()
    lr: Mapping[int, float] = field(default_factory=dict)
    compression: Compression = field(default_factory=Compression)
    compressed: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    rounds: Mapping[int, int] = field(default_factory=dict)

    def decode(
        self,
        message: Message,
        client_id: int,
        max_examples: int | None = None,
        max_steps: int | None = None,
        not_lost: str | None = None,
    ) -> Reply:
        """Return a client's reply.

        Args:
            message: the reply.
            client_id: the client that must have sent it.
            max_examples: that the client has registered; None: not checked.
            max_steps: that the recipe lets it take; None: not checked.
            not_lost: why the client cannot have lost its state; None: it can.

        Raises:
            RefusedReplyError: says why.
        """
        content = content_of(message)
        wanted = {UPDATE, METRICS, *self.payloads}
        if unknown := sorted(printable(name) for name in content.keys() - wanted):
            raise RefusedReplyError(f"it has the unknown records {unknown[:5]}")
        metrics = self._metrics(content, client_id, max_examples, max_steps, not_lost)
        largest = min(self.largest, self.summand / metrics["num-examples"])
        update, held = self._update(content, client_id, largest), frozenset(self.buffers)
        return Reply(
            client_id=client_id,
            num_examples=int(metrics["num-examples"]),
            num_steps=int(metrics["num-steps"]),
            lr_sum=metrics["lr-sum"],
            update={name: value for name, value in update.items() if name not in held},
            buffers={name: value for name, value in update.items() if name in held},
            payloads={
                name: self._payload(content, name, client_id) for name in sorted(self.payloads)
            },
            metrics=metrics,
            per_example=self.per_example,
        )

    def _metrics(
        self,
        content: RecordDict,
        client_id: int,
        max_examples: int | None,
        max_steps: int | None,
        not_lost: str | None,
    ) -> dict[str, float]:
        metrics = decode_metrics(content, _COUNTS, self._allowed)
        examples, steps, lr_sum = (metrics[n] for n in ("num-examples", "num-steps", "lr-sum"))
        if steps < 1:
            raise RefusedReplyError("it took no step")
        if metrics["partition-id"] != client_id:
            raise RefusedReplyError(f"it names partition {metrics['partition-id']:g}")
        if (seconds := metrics.get("fit-seconds", 0.0)) < 0:
            raise RefusedReplyError(f"its fit-seconds are {seconds:g}")
        if max_examples is not None and examples > max_examples:
            raise RefusedReplyError(
                f"it counts {examples:g} examples and has registered {max_examples}"
            )
        if max_steps is not None and steps > max_steps:
            raise RefusedReplyError(f"it counts {steps:g} steps, and the recipe has {max_steps}")
        # of one step at least and of all at most: methods divide by it
        lr = self.lr.get(client_id)
        least, most = (0.0, math.inf) if lr is None else (lr, steps * lr)
        if not least * (1 - 1e-6) <= lr_sum <= most * (1 + 1e-6):
            raise RefusedReplyError(
                f"its lr-sum is {lr_sum:g}: it must be from {least:g} to {most:g}, the step size "
                f"times 1 to {steps:g} steps"
            )
        if metrics.get(STATE_LOST) and not_lost is not None:
            raise RefusedReplyError(f"it says that it has lost its state, {not_lost}")
        return metrics

    def _update(self, content: RecordDict, client_id: int, largest: float) -> dict[str, Tensor]:
        record = record_in(content, UPDATE, ArrayRecord)
        if self.compression.up is None:
            return decode_tensors(UPDATE, record, self._shapes, self._dtypes, largest=largest)
        full = {name: value for name, value in self.params.items() if name in self.buffers}
        trained = {name: value for name, value in self.params.items() if name not in full}
        return self._decompressed(UPDATE, record, client_id, trained, full, largest)

    def _payload(self, content: RecordDict, name: str, client_id: int) -> dict[str, Tensor]:
        record, shapes = record_in(content, name, ArrayRecord), self.shapes.get(name)
        if self.compression.up is not None and name in self.compressed:
            tensors = {
                key: torch.empty(shape, dtype=self._dtype(key), device="meta")
                for key, shape in self.compressed[name].items()
            }
            return self._decompressed(name, record, client_id, tensors, {}, self.largest)
        what = name if record is None else f"payload {name!r}"
        dtypes = {self.dtypes[name]} if name in self.dtypes else self._dtypes
        return decode_tensors(what, record, shapes, dtypes, self.widest, self.largest)

    def _decompressed(
        self,
        name: str,
        record: ArrayRecord | None,
        client_id: int,
        tensors: Tensors,
        full: Tensors,
        largest: float,
    ) -> dict[str, Tensor]:
        what = name if record is None or name == UPDATE else f"payload {name!r}"
        codec, round = self.compression.up, self.rounds.get(client_id, 0)
        assert codec is not None
        seed = self.compression.draws(name, round, client_id + 1)
        return decode_compressed(what, record, codec, seed, tensors, full, largest)

    def _dtype(self, name: str) -> torch.dtype:
        return self.params[name].dtype if name in self.params else torch.float32

    @cached_property
    def _shapes(self) -> dict[str, tuple[int | None, ...]]:
        return {name: tuple(value.shape) for name, value in self.params.items()}

    @cached_property
    def _allowed(self) -> set[str] | None:
        """The names that its numbers may have; None: any."""
        return None if self.measures is None else {*_MEASURED, *self.measures}

    @cached_property
    def _dtypes(self) -> set[torch.dtype]:
        """The model's types, and float32, in which statistics and secure sums are."""
        return {torch.float32, *(value.dtype for value in self.params.values())}


# ---- registration, evaluation --------------------------------------------------------------------


@dataclass(frozen=True)
class NodeInfo:
    """A node's answer to the registration.

    Attributes:
        partition_id: which client it plays, from 0.
        num_partitions: how many clients its config speaks of.
        num_examples: that it trains on; 0 under secure aggregation.
        num_held_out: that it evaluates on; 0 if none are held out.
        texts: hashes of recipe and code, and versions, by name.
    """

    partition_id: int
    num_partitions: int
    num_examples: int
    num_held_out: int
    texts: Mapping[str, str]


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
    if metrics["partition-id"] != client_id:
        raise RefusedReplyError(f"it names partition {metrics['partition-id']:g}")
    if metrics["num-examples"] > max_examples:
        raise RefusedReplyError(
            f"it counts {metrics['num-examples']:g} examples and has registered {max_examples}"
        )
    return metrics
