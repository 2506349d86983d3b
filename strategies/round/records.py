"""Named tensors and metrics as Flower records, and the validation of replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from statistics import fmean

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor

from strategies.base import Payloads, RefusedReplyError, Reply, Shapes, Tensors
from strategies.round.array_codec import to_array, to_tensor

PARAMS, CONFIG, UPDATE, METRICS, CLIENT = "params", "config", "update", "metrics", "client"
PERSONAL_SCORE = "personal-"  # prefix of the scores of a client's own model


def to_record(tensors: Tensors) -> ArrayRecord:
    """Return named tensors as an ArrayRecord (host memory, C order)."""
    return ArrayRecord({name: to_array(value) for name, value in tensors.items()})


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Return an ArrayRecord as named tensors; object arrays (pickles) are refused by NumPy."""
    return {name: to_tensor(array) for name, array in record.items()}


def count_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays as serialised (data and per-array headers)."""
    return sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )


def check_finite(what: str, tensors: Tensors) -> None:
    """Refuse NaN and Inf."""
    for name, value in tensors.items():
        if not value.is_floating_point() or value.numel() == 0:
            continue
        if math.isfinite(value.sum()):  # fast path: a bad value spoils the sum
            continue
        low, high = value.aminmax()  # large values may spoil it, too
        if not (math.isfinite(low) and math.isfinite(high)):
            raise RefusedReplyError(f"{what} {name!r} holds NaN or Inf")


def check_shapes(what: str, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse missing and unknown names and wrong shapes."""
    if tensors.keys() != shapes.keys():
        missing, unknown = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
        raise RefusedReplyError(
            f"{what} lacks the tensors {sorted(missing)} and has unknown ones {sorted(unknown)}"
        )
    for name, shape in shapes.items():
        if (found := tuple(tensors[name].shape)) != shape:
            raise RefusedReplyError(f"{what} {name!r} has shape {found}, expected {shape}")


def parse_reply(
    message: Message,
    client_id: int,
    params: Tensors,
    buffers: Iterable[str],
    payload_names: Iterable[str],
    expected: Shapes,
) -> Reply:
    """Return a train reply's content, checked.

    Args:
        message: the reply.
        client_id: the client that must have sent it.
        params: the shared tensors that were sent, buffers included.
        buffers: names of the buffers among them.
        payload_names: the payloads that the client sides send.
        expected: names and shapes of the payloads that the server sides know.

    Raises:
        RefusedReplyError: says why.
    """
    if message.has_error():
        raise RefusedReplyError(f"error {message.error.code}: {message.error.reason}")
    content = message.content
    metrics = checked_metrics(content, {"partition-id", "num-examples", "num-steps", "lr-sum"})
    if metrics["num-steps"] < 1:
        raise RefusedReplyError("it took no step")
    if int(metrics["partition-id"]) != client_id:
        raise RefusedReplyError(f"it names partition {int(metrics['partition-id'])}")
    update, held = _tensors(content, UPDATE), set(buffers)
    check_shapes("update", update, {name: tuple(value.shape) for name, value in params.items()})
    check_finite("update", update)
    return Reply(
        client_id=client_id,
        num_examples=int(metrics["num-examples"]),
        num_steps=int(metrics["num-steps"]),
        lr_sum=metrics["lr-sum"],
        update={name: value for name, value in update.items() if name not in held},
        buffers={name: value for name, value in update.items() if name in held},
        payloads=_payloads(content, payload_names, expected),
        metrics=metrics,
    )


def valid_replies(
    replies: Iterable[Message],
    sent: Mapping[int, Message],
    parse: Callable[[Message, int], Reply],
    timeout_seconds: float,
) -> tuple[list[Reply], list[str], int]:
    """Return the valid replies by client id, why the others are missing, and the bytes received.

    ``sent`` are the messages by client id; ``parse`` reads one client's reply, or refuses it.
    """
    waiting = {message.metadata.dst_node_id: client for client, message in sent.items()}
    valid, failures, bytes_up = [], [], 0
    for node, reply in with_senders(replies, sent.values()):
        if reply.has_content():
            bytes_up += count_bytes(reply.content)
        client = waiting.pop(node, None)
        if client is None:
            reason = reply.error.reason if reply.has_error() else "unknown sender"
            failures.append(f"node {node}: {reason}")
            continue
        try:
            valid.append(parse(reply, client))
        except RefusedReplyError as refusal:
            failures.append(f"client {client}: {refusal}")
    why = no_reply(timeout_seconds)
    failures += [f"client {client}: {why}" for client in sorted(waiting.values())]
    return sorted(valid, key=lambda reply: reply.client_id), failures, bytes_up


def with_senders(
    replies: Iterable[Message], sent: Iterable[Message]
) -> Iterator[tuple[int, Message]]:
    """Yield each reply with the id of the node that it is for.

    The SuperLink answers with an error of its own for a node that it has lost. Such a reply does
    not name the node, only the message that the node was sent.
    """
    nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    for reply in replies:
        node = reply.metadata.src_node_id
        asked = reply.metadata.reply_to_message_id
        yield nodes.get(asked, node) if reply.has_error() and asked else node, reply


def no_reply(timeout_seconds: float) -> str:
    """Return the failure of a client that has not answered."""
    return f"no reply within {timeout_seconds:g} s (runtime.round_timeout_seconds)"


def _tensors(content: RecordDict, name: str) -> dict[str, Tensor]:
    record = content.array_records.get(name)
    if record is None:
        raise RefusedReplyError(f"it lacks the payload {name!r}")
    try:
        return to_tensors(record)
    except (ValueError, TypeError) as error:
        raise RefusedReplyError(f"payload {name!r} cannot be read: {error}") from error


def _payloads(content: RecordDict, names: Iterable[str], expected: Shapes) -> Payloads:
    payloads = {name: _tensors(content, name) for name in sorted(names)}
    for name, tensors in payloads.items():
        if name in expected:
            check_shapes(f"payload {name!r}", tensors, expected[name])
        check_finite(f"payload {name!r}", tensors)
    return payloads


def checked_metrics(content: RecordDict, required: Collection[str]) -> dict[str, float]:
    """Return a reply's numbers; refuse missing ones, NaN, Inf, and a count of no examples."""
    metrics = scalars(content.metric_records.get(METRICS, MetricRecord()))
    if missing := sorted(set(required) - metrics.keys()):
        raise RefusedReplyError(f"its metrics lack {missing}")
    if bad := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
        raise RefusedReplyError(f"its metrics {bad} are NaN or Inf")
    if metrics["num-examples"] < 1:
        raise RefusedReplyError("it has no example")
    return metrics


def valid_evaluations(replies: Iterable[Message]) -> list[dict[str, float]]:
    """Return the clients' valid evaluation metrics by client id; bad replies are logged."""
    rows = []
    for message in replies:
        node = message.metadata.src_node_id
        try:
            if message.has_error():
                raise RefusedReplyError(message.error.reason)
            rows.append(checked_metrics(message.content, {"partition-id", "num-examples"}))
        except RefusedReplyError as refusal:
            log(WARNING, "evaluation at node %s: %s", node, refusal)
    return sorted(rows, key=lambda row: row["partition-id"])


def to_metrics(values: Mapping[str, float]) -> MetricRecord:
    """Return numbers as a MetricRecord."""
    return MetricRecord({**values})


def scalars(record: MetricRecord) -> dict[str, float]:
    """Return a MetricRecord's numbers."""
    return {name: float(v) for name, v in record.items() if isinstance(v, int | float)}


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the clients' metrics, weighted by "num-examples".

    Counts ("num-examples", "num-steps") are summed; a metric that only some clients report is the
    mean over those.
    """
    counts = ("num-examples", "num-steps")
    names = sorted({name for row in metrics for name in row} - {"partition-id", *counts})
    result = {name: sum(row[name] for row in metrics if name in row) for name in counts}
    for name in names:
        rows = [row for row in metrics if name in row]
        weight = sum(row["num-examples"] for row in rows)
        result[name] = sum(row["num-examples"] * row[name] for row in rows) / weight
    return result


def personal_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of the client's own model."""
    return {name: value for name, value in metrics.items() if name.startswith(PERSONAL_SCORE)}


def mean_scores(scores: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the unweighted means over clients, by name."""
    rows = list(scores)
    names = sorted({name for row in rows for name in row})
    return {name: fmean(row[name] for row in rows if name in row) for name in names}
