"""Records that travel compressed: named tensors as the arrays of a codec, and back.

A record's tensors, in the order of their names, are one vector for the codec. What travels in full
(buffers) stays in the record beside the codec's arrays, under its own name.

The client keeps what a codec leaves out of a record under ``residual.<record>`` in its state, and
adds it to the next record (error feedback): for the update if the codec says so, for a payload
whenever that is sound, because the server adds payloads up from round to round. Like all client
state, a residual counts from the version of the client's last aggregated reply.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.random import SeedSequence
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, RefusedReplyError, Reply, Tensors
from fedhet.strategies.wire.compression import SERVER, Codec, Compression
from fedhet.strategies.wire.records import (
    CONFIG,
    PARAMS,
    UPDATE,
    array_records,
    record_in,
    to_record,
    to_tensors,
)
from fedhet.strategies.wire.tensor_decoder import check_finite, check_names, decode_tensor, label_of

Received = tuple[ArrayRecord, Tensors]  # a record, and its tensors
ClosedShapes = Mapping[str, Mapping[str, tuple[int, ...]]]  # by payload and tensor
_TENSORS = "tensors-of-"  # prefix of the config's entries that name a compressed payload's tensors
_NUMBERS = "numbers"  # the one tensor of a residual: the vector


def residual_key(record: str) -> str:
    """Return the key of the client state that holds a record's residual."""
    return f"residual.{record}"


def compressible(client_sides: Mapping[str, ClientSide]) -> frozenset[str]:
    """Return the payloads that are compressed, in both directions."""
    return frozenset(name for side in client_sides.values() for name in side.compressible)


def per_example(client_sides: Mapping[str, ClientSide]) -> frozenset[str]:
    """Return the payloads that grow with a client's number of examples."""
    return frozenset(name for side in client_sides.values() for name in side.per_example)


def compressed_shapes(
    client_sides: Mapping[str, ClientSide], known: ClosedShapes
) -> dict[str, Mapping[str, tuple[int, ...]]]:
    """Return the known shapes of the sent payloads that are compressed."""
    sent = {name for side in client_sides.values() for name in side.sends & side.compressible}
    if unknown := sorted(sent - known.keys()):
        raise ConfigError(
            f"the payloads {unknown} are declared compressible, and no server side's expected() "
            "has the shapes of their tensors: add them there"
        )
    return {name: known[name] for name in sorted(sent)}


# ---- a record ------------------------------------------------------------------------------------


def decode_compressed(
    what: str,
    record: ArrayRecord | None,
    codec: Codec,
    seed: SeedSequence,
    tensors: Tensors,
    full: Tensors,
    largest: float = math.inf,
) -> dict[str, Tensor]:
    """Return a record's tensors, dense and of their own type.

    Args:
        what: its name, for errors.
        record: None if the message lacks it.
        codec: that has encoded it.
        seed: of the record, its round and its sender.
        tensors: the compressed ones by name; only shapes and types count.
        full: those beside them, the same.
        largest: that the size of a number may be.

    Raises:
        RefusedReplyError: says why; a NonFiniteReplyError for NaN and Inf, and beyond ``largest``.
    """
    size = sum(value.numel() for value in tensors.values())
    wire: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (tuple(value.shape), value.dtype) for name, value in full.items()
    }
    if size:
        wire |= {name: ((length,), kind) for name, (length, kind) in codec.arrays(size).items()}
    record = check_names(what, record, wire.keys())
    found = {
        name: decode_tensor(label_of(what, name), record[name], shape, {kind})
        for name, (shape, kind) in wire.items()
    }
    beside = {name: found.pop(name) for name in full}
    try:
        numbers = codec.decode(found, size, seed) if size else torch.empty(0)
    except ValueError as error:
        raise RefusedReplyError(f"{what} {error}") from None
    dense = {**_split(numbers, tensors), **beside}
    check_finite(what, dense, largest)
    return dense


def _encode(codec: Codec, numbers: Tensor, seed: SeedSequence) -> ArrayRecord:
    return to_record(codec.encode(numbers, seed) if len(numbers) else {})


def _flat(tensors: Tensors) -> Tensor:
    parts = [tensors[name].detach().reshape(-1).cpu() for name in sorted(tensors)]
    return torch.cat(parts) if parts else torch.empty(0)


def _split(numbers: Tensor, like: Tensors) -> dict[str, Tensor]:
    names = sorted(like)
    parts = torch.split(numbers, [like[name].numel() for name in names]) if names else ()
    return {
        name: part.to(like[name].dtype).reshape(like[name].shape)
        for name, part in zip(names, parts, strict=True)
    }


# ---- up ------------------------------------------------------------------------------------------


def reply_records(
    reply: Reply,
    compression: Compression,
    payloads: Collection[str],
    round: int,
    state: MutableMapping[str, Any],
) -> RecordDict:
    """Return the array records of a reply to send.

    Args:
        reply: in full.
        compression: of the run.
        payloads: names of those that it compresses.
        round: t.
        state: the client state, in which the residuals are updated.
    """
    codec, content = compression.up, RecordDict()
    for name, tensors in {UPDATE: reply.update, **reply.payloads}.items():
        if codec is None or not _is_compressed(name, payloads):
            content[name] = to_record(tensors, shared=name == UPDATE)  # y - x, made for this
            continue
        seed = compression.draws(name, round, reply.client_id + 1)
        keeps = _keeps_residual(codec, name)
        key, numbers = residual_key(name), _flat(tensors)
        if keeps and key in state:
            numbers = numbers + state[key][_NUMBERS].to(numbers)
        content[name] = _encode(codec, numbers, seed)
        if keeps and len(numbers):
            arrays = to_tensors(content.array_records[name])
            state[key] = {_NUMBERS: numbers - codec.decode(arrays, len(numbers), seed)}
    if reply.buffers:
        content.array_records[UPDATE].update(to_record(reply.buffers))
    return content


def rounded_tensors(
    reply: Reply,
    content: RecordDict,
    compression: Compression,
    payloads: Collection[str],
    round: int,
) -> dict[str, Tensors]:
    """Return what the server reads from records without a residual at the client, by name.

    The arguments are those of :func:`reply_records`, and ``content`` is what it returned.
    """
    found: dict[str, Tensors] = {}
    for name, tensors in {UPDATE: reply.update, **reply.payloads}.items():
        codec, size = compression.up, sum(value.numel() for value in tensors.values())
        if codec is None or not _is_compressed(name, payloads) or size == 0:
            continue
        if _keeps_residual(codec, name):
            continue
        arrays = to_tensors(content.array_records[name])
        arrays = {key: arrays[key] for key in codec.arrays(size)}  # without the buffers
        seed = compression.draws(name, round, reply.client_id + 1)
        found[name] = _split(codec.decode(arrays, size, seed), tensors)
    return found


def _is_compressed(name: str, payloads: Collection[str]) -> bool:
    return name == UPDATE or name in payloads


def _keeps_residual(codec: Codec, name: str) -> bool:
    return codec.error_feedback or (name != UPDATE and codec.contracts)


# ---- down ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Downlink:
    """Writes what the clients of a round receive."""

    compression: Compression  # of the run
    payloads: Collection[str] = ()  # names of those that it compresses
    buffers: Collection[str] = ()  # names of the tensors of x that travel in full
    untrained: Collection[str] = ()  # names of those that clients do not send back

    def params(self, arrays: ArrayRecord, round: int) -> ArrayRecord:
        """Return the record of x and its buffers."""
        if (codec := self.compression.codec_down) is None:
            return arrays
        tensors = to_tensors(arrays)
        trained = {name: value for name, value in tensors.items() if name not in self.buffers}
        record = _encode(codec, _flat(trained), self.compression.draws(PARAMS, round, SERVER))
        record.update({name: arrays[name] for name in arrays if name not in trained})
        return record

    def payload(self, name: str, tensors: Tensors, round: int) -> ArrayRecord:
        """Return the record of a payload."""
        codec = self.compression.codec_down
        if codec is None or name not in self.payloads:
            return to_record(tensors)
        return _encode(codec, _flat(tensors), self.compression.draws(name, round, SERVER))

    def config(self, sent: Mapping[str, Tensors]) -> dict[str, list[str]]:
        """Return what the clients' config says of compressed payloads: their tensors' names."""
        if self.compression.codec_down is None:
            return {}
        chosen = sorted(sent.keys() & set(self.payloads))
        return {f"{_TENSORS}{name}": sorted(sent[name]) for name in chosen}


def received_tensors(
    content: RecordDict,
    compression: Compression,
    params: Tensors,
    buffers: Tensors,
    known: Received | None = None,
) -> dict[str, Tensors]:
    """Return the tensors of a train message by record, as the server has compressed them.

    Args:
        content: of the message.
        compression: of the run.
        params: the trainable shared tensors of the client's model.
        buffers: its shared buffers.
        known: x as decoded before: the clients of a process get the same record of it.
    """
    codec, found = compression.codec_down, dict[str, Tensors]()
    config = record_in(content, CONFIG, ConfigRecord) or ConfigRecord()
    for name, record in array_records(content).items():
        if name == PARAMS and known is not None and record is known[0]:
            found[name] = known[1]
            continue
        names: Any = params if name == PARAMS else config.get(f"{_TENSORS}{name}")
        if codec is None or names is None:
            found[name] = to_tensors(record)
            continue
        seed = compression.draws(name, int(str(config["round"])), SERVER)
        tensors, full = {one: params[one] for one in names}, buffers if name == PARAMS else {}
        found[name] = decode_compressed(name, record, codec, seed, tensors, full)
    return found
