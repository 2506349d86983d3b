"""What a hostile site may send: it is refused by name, and the run ends as without that site.

ARRAYS, METRICS_SENT and RECORDS have one attack a line, made of a genuine reply of each method.
"""

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app import MessageType as Kind

from fedhet.common.run_events import Event, decode, encode
from fedhet.conf import compose
from fedhet.server_app.run import Run
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.expectations import Expectations
from fedhet.strategies.round.registration import ClientRegistry
from fedhet.strategies.round.selection import Outcome, Selection
from fedhet.strategies.wire import border
from fedhet.strategies.wire.border import Bounds, Expected, ExpectedPayload, Sender
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.records import METRICS, UPDATE, to_tensors
from fedhet.strategies.wire.tensor_decoder import printable
from tests.recipes import TINY, grid_of, overrides, run_recipe
from tests.refused import refused

METHODS = ["fedavg", "scaffold", "fedpvr", "feddw", "maecho", "fedmrur", "fedproto", "fedamp"]
METHODS += ["fednova", "scaffold strategy/compression=top_k"]  # codecs: test_compressed_records.py
WORDS = [*TINY, "clients=4", "local.epochs=1", "task.train_size=240", "partition=iid"]
BAD = 3  # the hostile client


def npy(values: np.ndarray) -> bytes:
    """Return a header and bytes as numpy would, of any type."""
    described = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
    return header(repr(described)) + values.tobytes()


def header(text: str, length: int | None = None) -> bytes:
    body = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length or len(body)) + body


def as_type(name: str) -> Callable[[Array], bytes]:
    return lambda array: npy(array.numpy().astype(name))


def filled(value: complex, name: str = "f4") -> Callable[[Array], bytes]:
    return lambda array: npy(np.full_like(array.numpy(), value, dtype=name))


def one_spoilt(value: float) -> Callable[[Array], bytes]:
    def spoil(array: Array) -> bytes:
        values = array.numpy().copy()
        values.reshape(-1)[-1:] = value
        return npy(values)

    return spoil


def shaped(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Array], bytes]:
    return lambda array: npy(np.ascontiguousarray(change(array.numpy())))


F4 = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
ARRAYS: dict[str, Callable[[Array], bytes]] = {  # the bytes in place of an array's
    "nothing": lambda array: b"",
    "a zip": lambda array: b"PK\x03\x04" + bytes(100),
    "a cut-off header": lambda array: array.data[:40],
    "cut-off data": lambda array: array.data[:-1],
    "one byte too many": lambda array: array.data + b"\0",
    "no magic": lambda array: b"\x93NUMPX" + array.data[6:],
    "version 2": lambda array: b"\x93NUMPY\x02\x00" + array.data[8:],
    "version 9": lambda array: b"\x93NUMPY\x09\x00" + array.data[8:],
    "a header length of 65535": lambda array: array.data[:8] + b"\xff\xff" + array.data[10:],
    "a header length of 0": lambda array: array.data[:8] + b"\0\0" + array.data[10:],
    "an unbalanced header": lambda array: header("{'descr': '<f4', 'shape': (1,"),
    "a header of code": lambda array: header("__import__('os').system('true')"),
    "a header of nested brackets": lambda array: header("(" * 110),
    "a header without shape": lambda array: header("{'descr': '<f4', 'fortran_order': False}"),
    "a header of zeros": lambda array: header("\0" * 117),
    "a claimed shape of 10^18": lambda array: header(F4 % f"({10**18},)"),
    "a negative shape": lambda array: header(F4 % "(-1,)") + bytes(4),
    "a shape of text": lambda array: header(F4 % "('a',)") + bytes(4),
    "a shape of floats": lambda array: header(F4 % "(1.0,)") + bytes(4),
    "a shape of bools": lambda array: header(F4 % "(True,)") + bytes(4),
    "a shape of False": lambda array: header(F4 % "(False,)"),
    "40 dimensions": lambda array: header(F4 % f"({'1,' * 40})") + bytes(4),
    "Fortran order": lambda array: header(F4.replace("False", "True") % "(2, 2)") + bytes(16),
    "objects": lambda array: header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
    "text": lambda array: npy(np.array(["a" * 40])),
    "dates": lambda array: npy(np.array(["2026-11-23"], dtype="M8[D]")),
    "a structure": lambda array: header(F4.replace("'<f4'", "[('a', '<f4')]") % "(1,)") + bytes(4),
    "int8": as_type("i1"),
    "int16": as_type("i2"),
    "int32": as_type("i4"),
    "int64": as_type("i8"),
    "uint8": as_type("u1"),
    "uint16": as_type("u2"),
    "uint64": as_type("u8"),
    "bool": as_type("?"),
    "float16": as_type("f2"),
    "float64": as_type("f8"),
    "long double": as_type("g"),
    "complex64": as_type("c8"),
    "complex128": as_type("c16"),
    "big-endian": as_type(">f4"),
    "complex NaN": filled(complex("nan+nanj"), "c8"),
    "NaN": filled(float("nan")),
    "Inf": filled(float("inf")),
    "one NaN": one_spoilt(float("nan")),
    "one -Inf": one_spoilt(float("-inf")),
    "the largest float": filled(3.4e38),
    "one 3e38": one_spoilt(3e38),
    "one -1e20": one_spoilt(-1e20),
    "one dimension more": shaped(lambda x: x[None]),
    "one row more": shaped(lambda x: np.concatenate([np.atleast_1d(x)] * 2)),
    "no rows": shaped(lambda x: np.atleast_1d(x)[:0]),
    "other dimensions": shaped(lambda x: x.reshape(-1, 1, 1, 1)),
    "20 MB": shaped(lambda x: np.zeros(5_000_000, np.float32)),
}  # fmt: skip
METRICS_SENT: dict[str, tuple[str, Any]] = {  # a number in place of a genuine one
    "NaN examples": ("num-examples", float("nan")),
    "no example": ("num-examples", 0),
    "-1 examples": ("num-examples", -1),
    "one example too many": ("num-examples", 61),
    "half an example": ("num-examples", 0.5),
    "59.5 examples": ("num-examples", 59.5),
    "one step and a half": ("num-steps", 1.5),
    "10^9 examples": ("num-examples", 10**9),
    "10^300 examples": ("num-examples", 1e300),
    "a list of examples": ("num-examples", [60, 60]),
    "no time": ("fit-seconds", -1.0),
    "no step": ("num-steps", 0),
    "-5 steps": ("num-steps", -5),
    "Inf steps": ("num-steps", float("inf")),
    "10^6 steps": ("num-steps", 10**6),
    "more steps than an epoch has": ("num-steps", 2),
    "a negative lr-sum": ("lr-sum", -0.2),
    "an lr-sum of NaN": ("lr-sum", float("nan")),
    "an lr-sum of Inf": ("lr-sum", float("inf")),
    "an lr-sum of 10^9": ("lr-sum", 1e9),
    "twice the lr-sum": ("lr-sum", 0.4),
    "an lr-sum of 0": ("lr-sum", 0.0),
    "an lr-sum of 10^-12": ("lr-sum", 1e-12),
    "another client": ("partition-id", 0),
    "a client that is not there": ("partition-id", 99),
    "half a client": ("partition-id", 2.5),
    "a NaN client": ("partition-id", float("nan")),
    "a loss of NaN": ("train-loss", float("nan")),
    "a loss of Inf": ("train-loss", float("inf")),
    "a loss of 10^300": ("train-loss", 1e300),
    "a list of losses": ("train-loss", [1.0]),
    "an accuracy of 2": ("received-accuracy", 2.0),
    "an accuracy below 0": ("received-accuracy", -0.1),
    "the server's accuracy": ("accuracy", 1.0),
    "the server's loss": ("loss", 0.0),
    "the server's round": ("round", 0),
    "the server's rate": ("lr", 0.0),
    "the server's seconds": ("seconds", 0.0),
    "the server's bytes": ("bytes_up", 0),
    "the server's clients": ("clients", 0),
    "the server's failures": ("failures", 0),
    "the server's best": ("best_accuracy", 1.0),
    "the privacy's epsilon": ("dp-epsilon", 0.0),
    "the update's diagnostics": ("norm_ratio", 1.0),
    "a state that it cannot have lost": ("state-lost", 1.0),
    "half a lost state": ("state-lost", 0.5),
    "an unknown number": ("cheating", 1.0),
    "an empty name": ("", 1.0),
    "a name of several lines": ("a\nINFO: all is well", 1.0),
    "another personal score": ("personal-best", 1.0),
}
RECORDS: dict[str, Callable[[RecordDict], object]] = {
    "no update": lambda content: content.pop(UPDATE),
    "no metrics": lambda content: content.pop(METRICS),
    "an empty update": lambda content: content.update({UPDATE: ArrayRecord()}),
    "empty metrics": lambda content: content.update({METRICS: MetricRecord()}),
    "an update of metrics": lambda content: content.update({UPDATE: MetricRecord()}),
    "metrics of arrays": lambda content: content.update({METRICS: ArrayRecord()}),
    "metrics of text": lambda content: content.update({METRICS: ConfigRecord({"loss": "1"})}),
    "an unknown record": lambda content: content.update({"more": ArrayRecord()}),
    "a config": lambda content: content.update({"config": ConfigRecord({"round": 9})}),
    "a registration": lambda content: content.update({"client": ConfigRecord()}),
    "nothing at all": lambda content: content.clear(),
    "a tensor too few": lambda content: drop_first(content[UPDATE]),
    "a tensor too many": lambda content: renamed(content[UPDATE], "more", first_of),
    "a tensor of another name": lambda content: renamed(content[UPDATE], "x\n", drop_first),
    "another serialisation": lambda content: replace_first(content[UPDATE], stype="pickle"),
}  # fmt: skip


def first_of(record: ArrayRecord) -> Array:
    return next(iter(record.values()))


def renamed(record: ArrayRecord, name: str, take: Callable[[ArrayRecord], Array]) -> None:
    record[name] = take(record)


def drop_first(record: ArrayRecord) -> Array:
    return record.pop(next(iter(record)))


def replace_first(record: ArrayRecord, data: bytes | None = None, stype: str | None = None) -> None:
    name = next(iter(record))
    old = record[name]
    given = old.data if data is None else data
    record[name] = Array(old.dtype, tuple(old.shape), stype or old.stype, given)


def attacks(content: RecordDict) -> dict[str, Callable[[RecordDict], object]]:
    """Return all attacks on a reply, by name: an edit of its content."""
    found = dict(RECORDS) if content[UPDATE] else {}  # FedProto and FedAMP share none
    for record in filter(content.__getitem__, content.array_records):
        for name, bytes_of in ARRAYS.items():
            found[f"{record}: {name}"] = lambda c, r=record, b=bytes_of: replace_first(
                c[r], b(first_of(c[r]))
            )
    for name, (key, value) in METRICS_SENT.items():
        found[name] = lambda c, k=key, v=value: c[METRICS].update({k: v})
    return found


class Captured:
    """A run of one round, and the genuine reply of a client in it."""

    def __init__(self, method: str, folder: Any) -> None:
        words = [*WORDS, *f"strategy={method}".split(), "rounds=1", f"results_dir={folder}"]

        def keep(reply: Message) -> Message:
            if reply.metadata.src_node_id == 100 + BAD and METRICS in reply.content:
                self.reply = copy.deepcopy(reply)
            return reply

        run = Run(compose(overrides(*words)), folder, None)
        before = to_tensors(run.arrays)
        run.start(grid_of(words, 4, keep))
        self.step = run.strategy.server_step
        lr = float(run.recipe.local.lr)
        sides = run.strategy.client_sides
        codec = run.strategy.compression
        expectations = Expectations(self.step, sides, lambda examples: 1, (), codec)
        registry = ClientRegistry(4, num_examples=dict.fromkeys(range(4), 60))
        versions, told = ClientVersions(), dict.fromkeys(range(4), (1, lr))
        selection = Selection({}, Outcome([]), 0.0)
        folding = expectations.of_round(before, registry, versions, selection, told)
        self.expected: Expected = folding.expected


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[1:])]
)
def test_every_attack_on_a_reply_is_refused_by_name(method, tmp_path):
    """One site's genuine reply is accepted, and no spoilt copy of it is."""
    captured = Captured(method, tmp_path)

    def decode(reply: Message) -> None:
        decoded = border.decode(reply, BAD, captured.expected)
        captured.step.check(decoded)

    decode(captured.reply)
    tried = attacks(captured.reply.content)
    assert len(tried) >= (90 if method in ("fedproto", "fedamp") else 100)
    accepted, said = [], {}
    for name, edit in tried.items():
        reply = copy.deepcopy(captured.reply)
        edit(reply.content)
        try:
            decode(reply)
            accepted.append(name)
        except RefusedReplyError as refusal:
            said[name] = str(refusal)
    assert [name for name, text in said.items() if not text.isprintable()] == []
    harmless = {name for name in accepted if same_tensors(captured.reply, tried[name])}
    assert [name for name in accepted if name not in harmless] == []


@pytest.mark.parametrize(
    ("number", "length", "padding", "accepted"),
    [(3.0, 3, 0, True), (3.1, 3, 0, False), (3.0, 4, 0, False), (3.0, 3, 390, False)],
    ids=["at the limits", "times its examples", "a longer payload", "a longer header"],
)
def test_a_reply_is_accepted_up_to_its_limits_and_no_further(number, length, padding, accepted):
    """4 examples that weigh 12 together, an open dimension of 3, and a header of 512 bytes."""
    x = header((F4 % "(2,)").ljust(117 + padding)) + np.full(2, number, np.float32).tobytes()
    counted = {"partition-id": 0, "num-examples": 4, "num-steps": 1, "lr-sum": 1.0}
    content = RecordDict({METRICS: MetricRecord(counted)})
    for record, name, sent in ((UPDATE, "x", x), ("p", "a", npy(np.zeros(length, np.float32)))):
        content[record] = ArrayRecord({name: Array("float32", (1,), "numpy.ndarray", sent)})
    expected = Expected(
        {"x": torch.zeros(2)},
        {0: Sender()},
        payloads={"p": ExpectedPayload(shapes={"a": (None,)})},
        bounds=Bounds(largest=100.0, summand=12.0, widest=3),
    )
    message = Message(content, dst_node_id=1, message_type=Kind.TRAIN)
    if accepted:
        assert border.decode(message, 0, expected).update["x"].tolist() == [number] * 2
        return
    with pytest.raises(RefusedReplyError):
        border.decode(message, 0, expected)


def same_tensors(reply: Message, edit: Callable[[RecordDict], object]) -> bool:
    """Return whether an edit leaves the values and the types as they were, and all numbers."""
    spoilt = copy.deepcopy(reply)
    edit(spoilt.content)
    if spoilt.content.keys() != reply.content.keys():
        return False
    if dict(spoilt.content[METRICS]) != dict(reply.content[METRICS]):
        return False
    return all(
        array.numpy().dtype == spoilt.content[record][name].numpy().dtype
        and np.array_equal(array.numpy(), spoilt.content[record][name].numpy())
        for record, arrays in reply.content.array_records.items()
        for name, array in arrays.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_a_hostile_site_has_the_bits_of_one_without_it(method, tmp_path):
    """Ten clients, of which one attacks in every round and in the registration of the others."""
    words = [*WORDS, "clients=10", "task.train_size=400", "rounds=4"]
    words += f"strategy={method}".split()
    names = ["update: complex NaN", "10^9 examples", "the server's accuracy", "update: one 3e38"]
    count = iter(range(100))

    def hostile(reply: Message) -> Message | None:
        if reply.metadata.src_node_id != 100 + BAD or METRICS not in reply.content:
            return reply
        tried = attacks(reply.content)
        known = [name for name in names if name in tried]
        tried[known[next(count) % len(known)]](reply.content)
        return reply

    def absent(reply: Message) -> Message | None:
        trained = METRICS in reply.content
        return None if reply.metadata.src_node_id == 100 + BAD and trained else reply

    found, expected = (
        run_recipe(tmp_path / name, *words, clients=10, tamper=tamper)
        for name, tamper in (("hostile", hostile), ("absent", absent))
    )
    assert found["status"] == "completed"
    assert found["failures"] == 4
    for key in ("parameters_sha256", "accuracy", "loss"):
        assert found[key] == expected[key], key
    rows = (tmp_path / "hostile" / "metrics.jsonl").read_text().splitlines()
    assert all(f"client {BAD}: " in json.loads(row)["failures"][0] for row in rows[1:])


def test_a_sites_text_stays_on_its_line():
    reason = "broken\n\x1b[31mINFO: all is well\r\x00\u202e" + "x" * 1000
    shown = printable(reason)
    forged = encode(Event("0" * 32, "start", {"token": None}))
    assert decode(forged) is not None
    assert decode(printable(f"ValueError: {forged}")) is None  # it is logged before the key, too
    assert shown.isprintable()
    assert shown.startswith("broken\\n\\x1b[31mINFO")
    assert len(shown) < 400
    message = Message(RecordDict(), dst_node_id=1, message_type=Kind.TRAIN)
    with pytest.raises(RefusedReplyError) as refusal:
        border.decode(Message(Error(2, reason), reply_to=message), 0, Expected({}, {}))
    assert str(refusal.value).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddw", "feddistill", "fedproto", "maecho", "ensemble"])
@pytest.mark.parametrize("change", [0.5, -1.0, 100.0])
def test_counts_of_examples_are_whole_and_not_more_than_the_client_has(method, change, tmp_path):
    """They are moved from one class to another, so that their sum is right."""
    captured = Captured(method, tmp_path)
    found = 0
    for record in captured.reply.content.array_records.values():
        if "counts" in record:
            found += 1
            values = record["counts"].numpy().copy()
            values[0] += change - (values[0] if change < 0 else 0)
            values[1] -= change
            replaced = npy(values)
            old = record["counts"]
            record["counts"] = Array(old.dtype, tuple(old.shape), old.stype, replaced)
    assert found == 1
    with refused("counts", kind=RefusedReplyError):
        border.decode(captured.reply, BAD, captured.expected)
