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
from fedhet.strategies.round.array_codec import to_tensor
from fedhet.strategies.round.records import (
    CLIENT,
    METRICS,
    PERSONAL_SCORE,
    UPDATE,
    NonFiniteReplyError,
)

_LARGEST = torch.finfo(torch.float32).max  # of a number among the metrics
_MOST_CLIENTS = 10_000_000
_MOST_EXAMPLES = 1 << 48
_DIMS = 2  # of a payload whose shape no server side declares
_TEXT = 300  # characters of a site's text that are shown
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


def printable(text: object) -> str:
    """Return a site's text on one line, cut, with control characters escaped."""
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text)[:_TEXT])
    return shown + ("..." if len(str(text)) > _TEXT else "")


def content_of(message: Message) -> RecordDict:
    """Return a reply's content; refuse an error."""
    if message.has_error():
        error = message.error
        raise RefusedReplyError(f"error {error.code}: {printable(error.reason)}")
    return message.content


# ---- tensors -------------------------------------------------------------------------------------


def decode_tensors(
    what: str,
    record: ArrayRecord | None,
    shapes: Mapping[str, tuple[int | None, ...]] | None,
    dtypes: Collection[torch.dtype],
    widest: int = 0,
    largest: float = math.inf,
) -> dict[str, Tensor]:
    """Return a record's tensors.

    Args:
        what: its name, for errors.
        record: None if the reply lacks it.
        shapes: by name; None stands for any length up to ``widest``. Without ``shapes`` the names
            are free, and every length is up to ``widest``.
        dtypes: the allowed ones.
        widest: the longest that an open dimension may be.
        largest: that the size of a number may be; see :func:`largest_of`.

    Raises:
        RefusedReplyError: says why; a NonFiniteReplyError for NaN and Inf, and beyond ``largest``.
    """
    if record is None:
        raise RefusedReplyError(f"it lacks the payload {printable(what)!r}")
    if shapes is not None and record.keys() != shapes.keys():
        lacks = sorted(shapes.keys() - record.keys())
        unknown = sorted(printable(name) for name in record.keys() - shapes.keys())
        raise RefusedReplyError(
            f"{what} lacks the tensors {lacks} and has unknown ones {unknown[:5]}"
        )
    found = {}
    for name, array in record.items():
        try:
            found[name] = value = to_tensor(array)
        except ValueError as error:
            said = f"{label_of(what, name)} cannot be read: {printable(error)}"
            raise RefusedReplyError(said) from None
        if value.dtype not in dtypes:
            allowed = ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
            kind = str(value.dtype).removeprefix("torch.")
            raise RefusedReplyError(f"{label_of(what, name)} has the type {kind}, not {allowed}")
        expected = None if shapes is None else shapes[name]
        if value.shape != expected:
            check_shape(label_of(what, name), tuple(value.shape), expected, widest)
    check_finite(what, found, largest)
    return found


def label_of(what: str, name: str) -> str:
    """Return how errors name a tensor of a record."""
    return f"{what} {printable(name)!r}"


def check_shape(
    label: str, shape: tuple[int, ...], expected: tuple[int | None, ...] | None, widest: int
) -> None:
    """Refuse another shape; None stands for any length up to ``widest``, or for any such shape."""
    if expected is None and len(shape) > _DIMS:
        raise RefusedReplyError(
            f"{label} has shape {shape}: without a shape in ServerSide.expected a payload has at "
            f"most {_DIMS} dimensions"
        )
    expected = (None,) * len(shape) if expected is None else expected
    fits = len(shape) == len(expected) and all(
        length == wanted or (wanted is None and length <= widest)
        for length, wanted in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = tuple(f"<={widest}" if one is None else one for one in expected)
        raise RefusedReplyError(f"{label} has shape {shape}, expected {wanted}")


def check_finite(what: str, tensors: Tensors, largest: float = math.inf) -> None:
    """Refuse NaN and Inf, and numbers beyond +-``largest``."""
    for name, value in tensors.items():
        if not value.is_floating_point() or value.numel() == 0:
            continue
        low, high = (float(end) for end in value.aminmax())  # NaN if there is one
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteReplyError(f"{label_of(what, name)} holds NaN or Inf")
        if max(-low, high) > largest:
            raise NonFiniteReplyError(
                f"{label_of(what, name)} holds {high if high > -low else low:.3g}: numbers up to "
                f"{largest:.3g} can be added up"
            )


def largest_of(params: Tensors, num_clients: int) -> float:
    """Return the size of number up to which float32 holds all clients' sum of squares.

    It is sqrt(3.4e38 / (N d)), with d numbers in the model, or in a square of its widest layer:
    1e14 for a thousand clients and a model of 25 million parameters.
    """
    numbers = max(sum(value.numel() for value in params.values()), widest_of(params) ** 2)
    return math.sqrt(_LARGEST / (max(num_clients, 1) * numbers))


def widest_of(params: Tensors) -> int:
    """Return the longest side of the tensors, each as a matrix (outputs, inputs)."""
    sides = ((x.shape[0], math.prod(x.shape[1:])) for x in params.values() if x.dim() > 0)
    return max((length for pair in sides for length in pair), default=1 << 16)


# ---- numbers -------------------------------------------------------------------------------------


def decode_metrics(
    content: RecordDict, required: Collection[str], allowed: Collection[str] | None
) -> dict[str, float]:
    """Return a reply's numbers; refuse missing and unknown names, and what is out of range.

    ``allowed`` None: the server has made the reply itself, so any name is, and rounding is seen.
    """
    record = content.metric_records.get(METRICS, MetricRecord())
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
            raise NonFiniteReplyError(f"its metrics [{name!r}] are NaN or Inf, or too large")
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
        per_example: names of the payloads that are sums over a client's examples.
        lr: eta_l of the round; None: not checked.
    """

    params: Tensors
    buffers: Collection[str] = ()
    payloads: Collection[str] = ()
    shapes: Shapes = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    measures: Collection[str] | None = ()
    widest: int = 1 << 16
    largest: float = math.inf
    per_example: frozenset[str] = frozenset()
    lr: float | None = None

    def decode(
        self,
        message: Message,
        client_id: int,
        max_examples: int | None = None,
        max_steps: int | None = None,
        had_state: bool = True,
    ) -> Reply:
        """Return a client's reply.

        Args:
            message: the reply.
            client_id: the client that must have sent it.
            max_examples: that the client has registered; None: not checked.
            max_steps: that the recipe lets it take; None: not checked.
            had_state: whether the client can have lost a state.

        Raises:
            RefusedReplyError: says why.
        """
        content = content_of(message)
        wanted = {UPDATE, METRICS, *self.payloads}
        if unknown := sorted(printable(name) for name in content.keys() - wanted):
            raise RefusedReplyError(f"it has the unknown records {unknown[:5]}")
        metrics = self._metrics(content, client_id, max_examples, max_steps, had_state)
        update, held = self._update(content), frozenset(self.buffers)
        return Reply(
            client_id=client_id,
            num_examples=int(metrics["num-examples"]),
            num_steps=int(metrics["num-steps"]),
            lr_sum=metrics["lr-sum"],
            update={name: value for name, value in update.items() if name not in held},
            buffers={name: value for name, value in update.items() if name in held},
            payloads={name: self._payload(content, name) for name in sorted(self.payloads)},
            metrics=metrics,
            per_example=self.per_example,
        )

    def _metrics(
        self,
        content: RecordDict,
        client_id: int,
        max_examples: int | None,
        max_steps: int | None,
        had_state: bool,
    ) -> dict[str, float]:
        metrics = decode_metrics(content, _COUNTS, self._allowed)
        examples, steps, lr_sum = (metrics[n] for n in ("num-examples", "num-steps", "lr-sum"))
        if steps < 1:
            raise RefusedReplyError("it took no step")
        if metrics["partition-id"] != client_id:
            raise RefusedReplyError(f"it names partition {metrics['partition-id']:g}")
        if max_examples is not None and examples > max_examples:
            raise RefusedReplyError(
                f"it counts {examples:g} examples and has registered {max_examples}"
            )
        if max_steps is not None and steps > max_steps:
            raise RefusedReplyError(f"it counts {steps:g} steps, and the recipe has {max_steps}")
        if lr_sum < 0 or (self.lr is not None and lr_sum > steps * self.lr * (1 + 1e-6)):
            most = "" if self.lr is None else f", at most {steps * self.lr:g}"
            raise RefusedReplyError(f"its lr-sum is {lr_sum:g}: it must be at least 0{most}")
        if metrics.get(STATE_LOST) and not had_state:
            raise RefusedReplyError("it says that it lost its state, and it had none")
        return metrics

    def _update(self, content: RecordDict) -> dict[str, Tensor]:
        record = content.array_records.get(UPDATE)
        return decode_tensors(UPDATE, record, self._shapes, self._dtypes, largest=self.largest)

    def _payload(self, content: RecordDict, name: str) -> dict[str, Tensor]:
        record, shapes = content.array_records.get(name), self.shapes.get(name)
        what = name if record is None else f"payload {name!r}"
        dtypes = {self.dtypes[name]} if name in self.dtypes else self._dtypes
        return decode_tensors(what, record, shapes, dtypes, self.widest, self.largest)

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
