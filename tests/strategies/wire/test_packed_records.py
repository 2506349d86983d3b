"""Records on their way between the server and a site: as one array each, and back."""

import json
import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedhet.strategies.wire import packed_records
from fedhet.strategies.wire.packed_records import PACKED, packed, unpacked, with_plain_records
from fedhet.strategies.wire.records import to_record
from tests.refused import refused

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "a scalar": torch.tensor(7),
    "nothing": torch.empty(0, 4),
    "b": torch.tensor([1.5], dtype=torch.float64),
}


def content() -> RecordDict:
    record = to_record(TENSORS)
    record["no .npy file"] = Array(dtype="void", shape=(3, 4), stype="?", data=b"\x00\xff")
    return RecordDict({"x": record, "config": ConfigRecord({"round": 3}), "none": ArrayRecord()})


def fields(record: ArrayRecord) -> list[tuple[object, ...]]:
    return [(name, a.dtype, a.shape, a.stype, a.data) for name, a in record.items()]


def test_every_array_comes_back_as_it_was_and_in_its_place():
    plain = content()
    (sent,) = packed([plain])
    found = unpacked(sent)
    assert list(found) == list(plain)
    assert fields(found["x"]) == fields(plain["x"])
    assert (found["config"], fields(found["none"])) == (ConfigRecord({"round": 3}), [])
    assert [*sent["x"]] == [*sent["none"]] == [PACKED]
    assert unpacked(plain)["x"] is plain["x"]


def test_what_several_messages_hold_is_packed_once_and_travels_once():
    """As many objects for 200 arrays as for one, and no more for the second message."""
    state = to_record({str(i): torch.tensor([float(i)]) for i in range(200)})
    one, two = packed([RecordDict({"x": state}), RecordDict({"x": state})])
    assert one["x"] is two["x"]
    objects = [set(get_all_nested_objects(Message(each, 1, "train"))) for each in (one, two)]
    assert len(objects[0] ^ objects[1]) == 2  # the messages themselves
    single = packed([RecordDict({"x": to_record({"0": torch.zeros(1)})})])[0]
    assert len(objects[0]) == len(get_all_nested_objects(Message(single, 1, "train"))) < 10


def head_of(data: bytes) -> tuple[list, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_head(heads: object, data: bytes) -> bytes:
    head = json.dumps(heads).encode()
    return len(head).to_bytes(8, "little") + head + data


def received(data: bytes) -> RecordDict:
    record = ArrayRecord()
    record[PACKED] = Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)
    return unpacked(RecordDict({"x": record}))


def test_damaged_records_are_refused_whatever_the_damage():
    data = packed([content()])[0]["x"][PACKED].data
    heads, rest = head_of(data)
    assert fields(received(with_head(heads, rest))["x"]) == fields(content()["x"])
    size = len(rest)
    damaged = [
        *(b"", data[:7], data[:-1], data + b"\0", b"\xff" * 8 + data[8:], b"\0" * 8),
        *(with_head(wrong, rest) for wrong in (None, {}, [1], [[]], "x", [[1, 2, 3, 4, 5]])),
        with_head([*heads, heads[0]], rest + rest[: heads[0][-1]]),  # a name twice
        with_head([["a", "f", [1], "?", size + 1], ["b", "f", [1], "?", -1]], rest),
        with_head([["a", "f", [-1], "?", size]], rest),
        with_head([["a", "f", [True], "?", size]], rest),
        with_head([["a", "f", [1], "?", float(size)]], rest),
        (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20),
    ]
    for one in damaged:
        with pytest.raises((ValueError, RecursionError)):
            received(one)


@pytest.mark.slow
def test_a_head_of_millions_of_arrays_is_neither_made_nor_read(monkeypatch):
    heads = [[str(i), "f", [0], "?", 0] for i in range(200_000)]
    with refused("head of ", "bytes", kind=ValueError):
        received(with_head(heads, b""))
    monkeypatch.setattr(packed_records, "_LONGEST_HEAD", 100)
    plain = content()
    assert packed([plain])[0]["x"] is plain["x"]  # it travels as Flower's own do


@pytest.mark.slow
def test_random_bytes_in_the_head_give_arrays_or_a_refusal_and_nothing_else():
    choose = random.Random(0)
    data = packed([content()])[0]["x"][PACKED].data
    refused = 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(400)] = choose.randrange(256)
        try:
            found = received(bytes(changed))["x"]
        except ValueError:
            refused += 1
        else:
            assert sum(len(one.data) for one in found.values()) == len(head_of(data)[1])
    assert 500 < refused < 2000


def answered(sent: RecordDict, answer: RecordDict | Error) -> Message:
    asked: list[RecordDict] = []

    def app(message: Message, context: Context) -> Message:
        asked.append(message.content)
        return Message(answer, reply_to=message)

    message = Message(sent, dst_node_id=5, message_type="train")
    reply = with_plain_records(message, Context(1, 5, {}, RecordDict(), {}), app)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    assert reply.metadata.src_node_id == 5
    ((record),) = [one["x"] for one in asked]
    np.testing.assert_array_equal(record["a"].numpy(), TENSORS["a"].numpy())
    return reply


def test_an_app_sees_plain_records_and_its_reply_is_packed_as_the_message_was():
    plain, answer = content(), RecordDict({"y": to_record(TENSORS)})
    reply = answered(packed([plain])[0], answer)
    assert [*reply.content["y"]] == [PACKED]
    assert fields(unpacked(reply.content)["y"]) == fields(answer["y"])
    assert answered(plain, answer).content["y"] is answer["y"]
    assert answered(packed([plain])[0], Error(1, "why")).error.reason == "why"
