"""Named tensors and metrics as Flower records, and which message a reply answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedhet.common.flower.messages import SUPERLINK_NODE_ID
from fedhet.strategies.base import RefusedReplyError, Shapes, Tensors
from fedhet.strategies.wire.array_codec import bytes_of, to_array, to_tensor

PARAMS, CONFIG, UPDATE, METRICS, CLIENT = "params", "config", "update", "metrics", "client"
COLUMNS, CATEGORIES = "columns", "categories"  # of a table that sites fit together
KEPT = "kept"  # what a client keeps for itself begins as these tensors, not as the seed's
STATISTICS = "statistics"  # asks for those of the columns, and not for the registration
PERSONAL_SCORE = "personal-"  # prefix of the scores of a client's own model
NUM_CLIENTS = "num-clients"  # that a mean is of
PERSONAL_CLIENTS = f"{PERSONAL_SCORE}{NUM_CLIENTS}"

UNASKED = (
    "its reply answers no message that it was sent and that is waited for (it came twice, too "
    "late, or from before the run was resumed)"
)

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)
_Key = TypeVar("_Key")


class NonFiniteReplyError(RefusedReplyError):
    """A reply holds NaN or Inf, or numbers too large to be added up."""


def to_record(tensors: Tensors, *, shared: bool = False) -> ArrayRecord:
    """Return named tensors as an ArrayRecord (host memory).

    ``shared``: it may share their memory, since nobody writes to them any more.
    """
    record = ArrayRecord()  # made of a dict, it would copy every Array
    for name, value in tensors.items():
        record[name] = to_array(value, shared=shared)
    return record


def record_of_copy(tensors: Tensors) -> ArrayRecord:
    """Return :func:`to_record` of a copy in C order, which a machine's processes copy no more."""
    layout = torch.contiguous_format
    copies = {name: value.detach().clone(memory_format=layout) for name, value in tensors.items()}
    return to_record(copies, shared=True)


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Return an ArrayRecord as named tensors; object arrays (pickles) are refused by NumPy."""
    return {name: to_tensor(array) for name, array in record.items()}


def count_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays as serialised (data and per-array headers)."""
    records = array_records(content).values()
    return sum(bytes_of(array) for record in records for array in record.values())


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return a message's array records; ``content.array_records`` is a view that is slow to make.

    The same holds for those of the other kinds: see :func:`record_in`.
    """
    return {name: one for name, one in content.items() if isinstance(one, ArrayRecord)}


def record_in(content: RecordDict, name: str, kind: type[_Record]) -> _Record | None:
    """Return a message's record; None if it has none with that name and kind."""
    found = content.get(name)
    return found if isinstance(found, kind) else None


def config_of(message: Message) -> dict[str, Any]:
    """Return a copy of a message's config; empty without one."""
    return dict((record_in(message.content, CONFIG, ConfigRecord) or {}).items())


def may_answer(reply: Message, node: int) -> bool:
    """Return whether a reply to a message that ``node`` was sent is that node's.

    The SuperLink answers with an error of its own for a node that it has lost.
    """
    sender = reply.metadata.src_node_id
    return sender == node or (sender == SUPERLINK_NODE_ID and reply.has_error())


def matched(
    replies: Iterable[Message], sent: Mapping[_Key, Message]
) -> Iterator[tuple[_Key | None, Message]]:
    """Yield each reply with the key of the message that it answers.

    The key is None for a reply to none of these messages, for one of a node that was not sent the
    message, and for a second one (see ``UNASKED``).
    """
    waiting: dict[str, _Key] = {}
    for number, reply in enumerate(replies):
        if number == 0:  # the grid has given the messages their ids
            waiting = {message.metadata.message_id: key for key, message in sent.items()}
        asked = reply.metadata.reply_to_message_id
        key = waiting.get(asked)
        if key is not None and may_answer(reply, sent[key].metadata.dst_node_id):
            del waiting[asked]
            yield key, reply
        else:
            yield None, reply


def no_reply(timeout_seconds: float) -> str:
    """Return the failure of a client that has not answered."""
    return f"no reply within {timeout_seconds:g} s (runtime.round_timeout_seconds)"


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
    given = {name for row in metrics for name in row}
    counts = [name for name in ("num-examples", "num-steps") if name in given]
    names = sorted(given - {"partition-id", *counts})
    result: dict[str, float] = {
        count: sum(row[count] for row in metrics if count in row) for count in counts
    }
    for name in names:
        rows = [row for row in metrics if name in row]
        weight = sum(row["num-examples"] for row in rows)
        result[name] = sum(row["num-examples"] * row[name] for row in rows) / weight
    return result


def personal_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of the client's own model."""
    return {name: value for name, value in metrics.items() if name.startswith(PERSONAL_SCORE)}


def mean_scores(scores: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the unweighted means of clients' own models' scores, and of how many clients."""
    names = sorted({name for row in scores for name in row})
    means = {name: fmean(row[name] for row in scores if name in row) for name in names}
    return {**means, PERSONAL_CLIENTS: len(scores)} if means else {}


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


# Each look costs the SuperLink CPU time; a site looks for work every 3 s.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.25, 3.0
_SHARE = 0.05  # of the time waited so far: the most by which a pause lengthens a round


def pause(waited: float) -> float:
    """Return the seconds to pause after so many seconds in vain."""
    return min(max(_SHARE * waited, _SHORTEST_SECONDS), _LONGEST_SECONDS)


def give_up(grid: Grid, message_ids: Iterable[str]) -> None:
    """Tell a grid that pulls replies ahead (common/flower/arriving_replies.py) to leave these."""
    if (told := getattr(grid, "give_up", None)) is not None:
        told(message_ids)
