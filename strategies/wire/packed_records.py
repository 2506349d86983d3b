"""One array in place of a record's many, on the way between the server and a site.

Flower stores and sends every array of a message as a separate object, with a call and some writes
to the SuperLink's database. The state of ResNet-18 and a control variate make 126 objects. If three
sites send such replies at once, the database stays locked for longer than Flower waits. Packed,
they are 24 objects of at most 5 MB.

A packed record holds the length of its head, the head (the arrays' descriptions, as JSON), and the
arrays' bytes. Records are packed only on the way: strategies, clients and mods see plain records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from fedhet.common.flower.messages import make_message

PACKED = "fedhet.packed"  # the one array's name and serialisation
_LENGTH = struct.Struct("<Q")
# Some 40,000 arrays: a site must not make the server build millions of them.
_LONGEST_HEAD = 4 << 20
_HEAD = (str, str, list, str, int)  # name, dtype, shape, serialisation, bytes


def packed(contents: Iterable[RecordDict]) -> list[RecordDict]:
    """Return contents with every ArrayRecord packed; a shared record is packed once."""
    done: dict[int, ArrayRecord] = {}

    def once(record: ArrayRecord) -> ArrayRecord:
        if id(record) not in done:
            done[id(record)] = _pack(record)
        return done[id(record)]

    return [_with_arrays(content, once) for content in contents]


def unpacked(content: RecordDict) -> RecordDict:
    """Return a content with plain records; a record that is not packed stays as it is.

    Raises:
        ValueError: a packed record is damaged.
    """
    return _with_arrays(content, lambda one: _unpack(one[PACKED]) if _is_packed(one) else one)


def with_plain_records(
    message: Message, context: Context, app: Callable[[Message, Context], Message]
) -> Message:
    """Show an app plain records, and pack its reply to a packed message: a mod of a ClientApp.

    fedhet's ClientApp has this mod; your own ClientApp that calls fedhet's needs it, too.
    """
    records = message.content.values() if message.has_content() else ()
    if not any(isinstance(one, ArrayRecord) and _is_packed(one) for one in records):
        return app(message, context)
    reply = app(make_message(message.metadata, unpacked(message.content)), context)
    if reply.has_error():
        return reply
    return make_message(reply.metadata, packed([reply.content])[0])


def _with_arrays(content: RecordDict, change: Callable[[ArrayRecord], ArrayRecord]) -> RecordDict:
    changed = RecordDict()
    for name, record in content.items():
        changed[name] = change(record) if isinstance(record, ArrayRecord) else record
    return changed


def _is_packed(record: ArrayRecord) -> bool:
    return list(record) == [PACKED] and record[PACKED].stype == PACKED


def _pack(record: ArrayRecord) -> ArrayRecord:
    heads = [
        (name, one.dtype, list(one.shape), one.stype, len(one.data)) for name, one in record.items()
    ]
    head = json.dumps(heads).encode()
    if len(head) > _LONGEST_HEAD:
        return record
    data = b"".join([_LENGTH.pack(len(head)), head, *(one.data for one in record.values())])
    one = ArrayRecord()
    one[PACKED] = Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)
    return one


def _unpack(array: Array) -> ArrayRecord:
    data = memoryview(array.data)
    if len(data) < _LENGTH.size:
        raise ValueError(f"a packed record of {len(data)} bytes has no head")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    if length > min(len(data) - _LENGTH.size, _LONGEST_HEAD):
        raise ValueError(f"a packed record's head of {length} bytes is too long")
    end = _LENGTH.size + length
    heads = json.loads(bytes(data[_LENGTH.size : end]))
    if not isinstance(heads, list) or not all(map(_is_head, heads)):
        raise ValueError("the head of a packed record is damaged")
    if sum(size for *_, size in heads) != len(data) - end:
        raise ValueError(f"a packed record has {len(data) - end} bytes, its head says others")
    record = ArrayRecord()
    for name, dtype, shape, stype, size in heads:
        if name in record:
            raise ValueError(f"a packed record has two arrays {name!r}")
        content = bytes(data[end : end + size])
        record[name] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=content)
        end += size
    return record


def _is_head(head: object) -> bool:
    """Return whether this describes an array, with no size that JSON allows and bytes do not."""
    if not isinstance(head, list) or len(head) != len(_HEAD):
        return False
    right = all(type(value) is kind for value, kind in zip(head, _HEAD, strict=True))
    return right and head[-1] >= 0 and all(type(size) is int and size >= 0 for size in head[2])
