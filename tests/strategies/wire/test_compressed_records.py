"""Rounds whose messages are compressed: what is left out, what is sent, what is refused."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict

from fedhet.client_app import messages
from fedhet.client_app.state import ContextStateStore
from fedhet.strategies.average import Average
from fedhet.strategies.base import ClientSide, RefusedReplyError, Reply
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fedbuff import FedAsync
from fedhet.strategies.fedpvr import FedPVR
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.systems import Constant
from fedhet.strategies.round.client_snapshots import ClientSnapshots
from fedhet.strategies.scaffold import DELTA, SCAFFOLD
from fedhet.strategies.wire.border import Bounds, Expected, ExpectedPayload, Sender, encode
from fedhet.strategies.wire.border import decode as decoded
from fedhet.strategies.wire.compressed_records import compressed_shapes
from fedhet.strategies.wire.compression import (
    BFloat16,
    Compression,
    Float16,
    Int4,
    Int8,
    RandomK,
    TopK,
)
from fedhet.strategies.wire.records import METRICS, count_bytes, to_record, to_tensors
from tests.federation import Regression, TensorBatches, federate
from tests.refused import refused
from tests.strategies.modes.private.test_differential_privacy import central
from tests.strategies.round.test_round import Forgetful, Normed, without
from tests.strategies.sides import built

SIZE, CLIENTS, ROUNDS = 12, 3, 5
OPTIONS = LocalTrainingConfig(batch_size=8, epochs=1)
RESIDUAL = {"update": "residual.update", DELTA: f"residual.{DELTA}"}


def datasets() -> list[TensorBatches]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(CLIENTS, 8, SIZE + 1, generator=generator, dtype=torch.float64)
    return [TensorBatches(part[:, :SIZE], part[:, SIZE]) for part in rows]


# ---- error feedback ------------------------------------------------------------------------------


class Watched:
    """A run of ROUNDS rounds, with what each client had to send and what the server made of it."""

    def __init__(self, monkeypatch, compression, stores=None, tamper=lambda reply: reply) -> None:
        self.stores = stores or {i: ContextStateStore(RecordDict()) for i in range(CLIENTS)}
        self.true = defaultdict(list)  # by client: (round, record, numbers)
        self.decoded = defaultdict(lambda: torch.zeros(1, SIZE, dtype=torch.float64))
        whole = messages.encode

        def watching(reply, compression, payloads, round, state):
            for name, tensors in {"update": reply.update, DELTA: reply.payloads[DELTA]}.items():
                self.true[reply.client_id].append((round, name, tensors["head.weight"].clone()))
            return whole(reply, compression, payloads, round, state)

        def add_up(params, replies):
            for reply in replies:
                self.decoded[reply.client_id, "update"] += reply.update["head.weight"]
                self.decoded[reply.client_id, DELTA] += reply.payloads[DELTA]["head.weight"]
            return replies

        monkeypatch.setattr(messages, "encode", watching)
        self.strategy = built(
            SCAFFOLD, local_lr=0.05, compression=compression, transforms={"add_up": add_up}
        )
        how = {"stores": self.stores, "options": OPTIONS, "tamper": tamper}
        model = partial(Regression, SIZE)
        federate(self.strategy, datasets(), model=model, rounds=ROUNDS, **how)

    def state(self, client: int) -> dict:
        run = self.strategy.state
        return self.stores[client].load(run.experiment, run.committed[client])

    def residual(self, client: int, record: str) -> torch.Tensor:
        kept = self.state(client).get(RESIDUAL[record])
        return torch.zeros(1, SIZE) if kept is None else kept["numbers"].view(1, SIZE)


CODECS = [TopK(share=0.2), RandomK(share=0.2), Int4(block=5, error_feedback=True)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_what_was_decoded_and_the_residual_are_the_sum_of_what_was_to_be_sent(codec, monkeypatch):
    """Client 1's reply of round 3 is lost: that round's update counts as if never made."""
    asked = iter(range(100))

    def lose(reply: Message) -> Message | None:
        trained = METRICS in reply.content
        return without(1)(reply) if trained and next(asked) // CLIENTS == 2 else reply

    run = Watched(monkeypatch, Compression(up=codec), tamper=lose)
    for client in range(CLIENTS):
        for record in RESIDUAL:
            lost = {3} if client == 1 else set()
            true = sum(v for t, n, v in run.true[client] if n == record and t not in lost)
            found = run.decoded[client, record] + run.residual(client, record)
            torch.testing.assert_close(found, true, rtol=0, atol=1e-12)
            assert float(run.residual(client, record).abs().max()) > 1e-4


def control_variates(run: Watched) -> tuple[torch.Tensor, torch.Tensor]:
    """Return N c with what is still to come of the clients, and the sum of all c_i."""
    server = run.strategy.server_sides["scaffold"].control_variate["head.weight"] * CLIENTS
    pending = sum(run.residual(client, DELTA) for client in range(CLIENTS))
    own = sum(run.state(client)["control_variate"]["head.weight"] for client in range(CLIENTS))
    return server + pending, own


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [TopK(share=0.2), BFloat16(), Int8()], ids=lambda c: type(c).__name__
)
def test_c_is_the_mean_of_all_c_i_but_for_the_residuals_also_after_a_lost_state(codec, monkeypatch):
    """Casts and integers keep no residual of the update, and one of what the server adds up."""
    stores = {i: ContextStateStore(RecordDict()) for i in range(CLIENTS)} | {1: Forgetful()}
    run = Watched(monkeypatch, Compression(up=codec), stores)
    assert run.strategy.state.restarted["control_variate"] == 4
    assert (RESIDUAL["update"] in run.state(0)) == codec.error_feedback
    torch.testing.assert_close(*control_variates(run), rtol=0, atol=1e-12)


def test_scaled_random_k_keeps_nothing(monkeypatch):
    run = Watched(monkeypatch, Compression(up=RandomK(share=0.5, error_feedback=False)))
    assert run.state(0).keys() == {"control_variate"}


# ---- down ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("down", "codec"), [("int8", Int8()), ("bfloat16", BFloat16())])
def test_clients_train_from_what_was_sent_and_the_server_steps_from_its_own_x(down, codec):
    """One step: y_i - C(x) = -lr g_i(C(x)), with g_i(x) = X'(X x - t) / n by hand."""
    x = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    compression, sent = Compression(down=down, seed=7), []
    strategy = built(FedAvg, local_lr=0.1, compression=compression)
    grid = {"model": partial(Regression, SIZE), "rounds": 1, "options": OPTIONS}
    write = strategy.configure_train

    def configure(*asked):
        sent.append(write(*asked))
        return sent[-1]

    strategy.configure_train = configure
    params, [_, report] = federate(strategy, datasets(), initial={"head.weight": x}, **grid)
    record = next(iter(sent[0])).content["params"]
    draws = compression.draws("params", 1, 0)
    received = codec.decode(to_tensors(record), SIZE, draws).double().view(1, SIZE)
    assert 1e-4 < float((received - x).abs().max()) < 0.1
    steps = [-0.1 * (received @ d.inputs.T - d.labels) @ d.inputs / 8 for d in datasets()]
    torch.testing.assert_close(params["head.weight"], x + sum(steps) / 3, rtol=0, atol=1e-12)
    assert report.bytes_down == CLIENTS * count_bytes(RecordDict({"params": record}))


@pytest.mark.slow
def test_a_payload_down_names_its_tensors_and_buffers_travel_in_full():
    """FedPVR corrects the head alone; BatchNorm's statistics are exact in both directions."""
    compression = Compression(up=TopK(share=0.5), down="int8")
    asked, answered = [], []

    def keep(reply: Message) -> Message:
        answered.append(reply.content)
        return reply

    strategy = built(
        FedPVR, layers="head.*", local_lr=0.1, compression=compression, buffers=BUFFERS
    )
    write = strategy.configure_train
    strategy.configure_train = lambda *a: asked.append(write(*a)) or asked[-1]
    how = {"model": Normed, "rounds": 1, "options": OPTIONS}
    params, _ = federate(strategy, pairs(), tamper=keep, **how)
    mean = torch.cat([data.inputs for data in pairs()]).mean(0)
    torch.testing.assert_close(params["norm.running_mean"], 0.1 * mean)
    content = next(iter(asked[0])).content
    assert content["config"]["tensors-of-control_variate"] == ["head.weight"]
    assert set(content["control_variate"]) == {".values", ".scales"}
    for record in (content["params"], next(c for c in answered if METRICS in c)["update"]):
        plain = {name for name in record if not name.startswith(".")}
        assert plain == {"norm.running_mean", "norm.running_var"}


BUFFERS = ["norm.running_mean", "norm.running_var"]


def pairs() -> list[TensorBatches]:
    return [TensorBatches(data.inputs[:, :2], data.labels) for data in datasets()]


# ---- on the wire ---------------------------------------------------------------------------------

SHAPES = {"b": (7,), "a": (14, 71)}  # 1001 numbers
NUMBERS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for name, shape in SHAPES.items()
}
HEADER = 128


def reply_of(codec, update=NUMBERS) -> Message:
    """Return client 4's reply of round 9."""
    counts = {"num-examples": 5, "num-steps": 1, "lr-sum": 0.1}
    metrics = {"partition-id": 4, **counts}
    reply = Reply(4, 5, 1, 0.1, update, {"delta": update}, metrics)
    content = encode(reply, Compression(up=codec, seed=1), {"delta"}, 9, {})
    asked = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    return Message(content, reply_to=asked)


def decode(codec, message: Message, update=NUMBERS) -> Reply:
    like = {name: value.to("meta") for name, value in update.items()}
    shapes = {name: tuple(value.shape) for name, value in update.items()}
    delta = {"delta": ExpectedPayload(shapes, compressed=True)}
    codecs, bounds, senders = Compression(up=codec, seed=1), Bounds(1e15), {4: Sender(round=9)}
    expected = Expected(like, senders, payloads=delta, bounds=bounds, compression=codecs)
    return decoded(message, 4, expected)


BYTES = [  # of a record of 1001 numbers: data and headers
    (None, 4 * 1001 + 2 * HEADER),
    (Float16(), 2 * 1001 + HEADER),
    (BFloat16(), 2 * 1001 + HEADER),
    (Int8(), 1001 + 4 * 8 + 2 * HEADER),  # 8 blocks of 128
    (Int8(block=1000), 1001 + 4 * 2 + 2 * HEADER),
    (Int4(), 501 + 4 * 8 + 2 * HEADER),
    (TopK(share=0.01), (4 + 2) * 10 + 2 * HEADER),
    (RandomK(share=0.01), 4 * 10 + HEADER),
]


@pytest.mark.parametrize(("codec", "size"), BYTES, ids=lambda one: type(one).__name__)
def test_a_record_has_the_stated_bytes_and_the_tensors_are_put_together_by_name(codec, size):
    message = reply_of(codec)
    assert count_bytes(message.content) == 2 * size
    decoded = decode(codec, message).update
    assert {name: tuple(value.shape) for name, value in decoded.items()} == SHAPES
    assert all(value.dtype == torch.float32 for value in decoded.values())
    numbers = expected = torch.cat([NUMBERS["a"].view(-1), NUMBERS["b"]])  # by name
    if codec is not None:
        draws = Compression(up=codec, seed=1).draws("update", 9, 5)
        expected = codec.decode(codec.encode(numbers, draws), 1001, draws)
    assert torch.equal(torch.cat([decoded["a"].view(-1), decoded["b"]]), expected)


# ---- refused -------------------------------------------------------------------------------------


def put(name: str, change: Callable) -> Callable[[ArrayRecord], ArrayRecord]:
    """Return an edit of one array, as a tensor."""

    def edit(record: ArrayRecord) -> ArrayRecord:
        tensors = to_tensors(record)
        tensors[name] = change(tensors[name])
        return to_record(tensors)

    return edit


def at(name: str, place: int, value: float) -> Callable[[ArrayRecord], ArrayRecord]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.numpy().copy()  # torch sets no uint16
        values[place] = value
        return torch.from_numpy(values)

    return put(name, change)


def drop(name: str) -> Callable[[ArrayRecord], ArrayRecord]:
    return lambda record: ArrayRecord({n: a for n, a in record.items() if n != name})


def plain(record: ArrayRecord) -> ArrayRecord:
    return to_record(NUMBERS)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(tensor.numpy()[::-1].copy())


LONG = {"w": torch.randn(70_000, generator=torch.Generator().manual_seed(4))}
MISSING = r"lacks the tensors \['.scales', '.values'\] and has unknown ones \['a', 'b'\]"
NOT_FINITE = "holds NaN or Inf"
REFUSED = [
    (Int8(), plain, MISSING),
    (Int8(), drop(".scales"), r"lacks the tensors \['.scales'\] and has unknown ones \[\]"),
    (Int8(), lambda r: ArrayRecord({**r, **plain(r)}), r"unknown ones \['a', 'b'\]"),
    (Int8(), lambda r: ArrayRecord({**r, ".counts": r[".scales"]}), r"unknown ones \['.counts'\]"),
    (Int8(), put(".values", lambda v: v[:-1]), r"'.values' has shape \(1000,\), expected \(1001,"),
    (Int8(), put(".values", lambda v: v.view(11, 91)), r"has shape \(11, 91\)"),
    (Int8(), put(".values", lambda v: v.float()), "'.values' has the type float32, not int8"),
    (Int8(), put(".values", lambda v: v.view(torch.uint8)), "has the type uint8, not int8"),
    (Int8(), put(".scales", lambda v: v.double()), "'.scales' has the type float64, not float32"),
    (Int8(), put(".scales", lambda v: v[:1]), r"'.scales' has shape \(1,\), expected \(8,\)"),
    (Int8(), at(".scales", 2, math.nan), NOT_FINITE),
    (Int8(), at(".scales", 2, math.inf), NOT_FINITE),
    (Int8(), at(".scales", 2, 3.4e38), NOT_FINITE),
    (Int8(), at(".scales", 2, 1e15), r"numbers up to 1e\+15 can be added up"),
    (Int8(), at(".scales", 2, -0.1), "holds a scale below 0"),
    (Int8(), at(".values", 2, -128), "holds a level below -127"),
    (Int4(), at(".values", 2, 0x01), "holds a level below -7"),
    (Int4(), at(".values", -1, 0x18), "holds a number too many"),
    (Int4(), put(".values", lambda v: torch.cat([v, v])), r"has shape \(1002,\), expected \(501,"),
    (TopK(), at(".values", 3, math.nan), NOT_FINITE),
    (TopK(), at(".values", 3, 1e16), "can be added up"),
    (TopK(), put(".values", lambda v: v[:9]), r"has shape \(9,\), expected \(10,\)"),
    (TopK(), put(".values", lambda v: v[:0]), r"has shape \(0,\)"),
    (TopK(), put(".indices", swapped), "indices that do not rise from 0 to 1000"),
    (TopK(), put(".indices", lambda v: v.int()), "has the type int32, not uint16"),
    (TopK(), at(".indices", -1, 1001), "indices that do not rise from 0 to 1000"),
    (TopK(), at(".indices", -1, 65_535), "indices that do not rise from 0 to 1000"),
    (TopK(), lambda r: at(".indices", 1, to_tensors(r)[".indices"].numpy()[0])(r), "do not rise"),
    (RandomK(), put(".values", lambda v: v[:9]), r"has shape \(9,\), expected \(10,\)"),
    (RandomK(), at(".values", 3, -math.inf), NOT_FINITE),
    (Float16(), at(".values", 3, math.nan), NOT_FINITE),
    (Float16(), put(".values", lambda v: v.float()), "has the type float32, not float16"),
    (BFloat16(), at(".values", 3, 0x7FC0), NOT_FINITE),
    (BFloat16(), put(".values", lambda v: v.view(torch.float16)), "type float16, not int16"),
    (None, lambda r: reply_of(Int8()).content["update"], r"lacks the tensors \['a', 'b'\]"),
]
COUNTS = [
    (at(".counts", 0, -1), "counts"),
    (put(".counts", lambda v: v + 1), "counts 702 indices, and has 700"),
    (put(".counts", lambda v: v[:1]), r"has shape \(1,\), expected \(2,\)"),
    (put(".counts", lambda v: torch.tensor([0, 700]).int()), "indices that do not rise"),
    (put(".counts", lambda v: torch.tensor([2**31 - 1, -(2**31) + 701]).int()), "counts"),
]


@pytest.mark.parametrize("record", ["update", "delta"])
@pytest.mark.parametrize(("codec", "edit", "why"), REFUSED)
def test_a_damaged_record_is_refused_with_the_reason(codec, edit, why, record):
    message = copy.deepcopy(reply_of(codec))
    decode(codec, message)
    message.content[record] = edit(message.content.array_records[record])
    with pytest.raises(RefusedReplyError, match=why) as refusal:
        decode(codec, message)
    assert str(refusal.value).startswith("update" if record == "update" else "payload 'delta'")


@pytest.mark.parametrize(("edit", "why"), COUNTS)
def test_damaged_counts_are_refused(edit, why):
    message = reply_of(TopK(), LONG)
    message.content["update"] = edit(message.content.array_records["update"])
    with pytest.raises(RefusedReplyError, match=why):
        decode(TopK(), message, LONG)


def test_privacy_that_it_would_break_is_refused_and_the_rest_goes_together():
    secure, up = SecAggPlus(max_examples=50), Compression(up=Int8())
    with refused("strategy/compression", "strategy/secure_aggregation"):
        built(FedAvg, compression=up, secure_aggregation=secure)
    with refused("strategy/compression", "clipping=client"):
        central(compression=up)
    central(clipping="server", compression=up)
    how = {"model": partial(Regression, SIZE), "rounds": 1, "options": OPTIONS}
    down = {"compression": Compression(down="bfloat16"), "local_lr": 0.1}
    start = {"head.weight": torch.full((1, SIZE), 0.123, dtype=torch.float64)}
    plain, _ = federate(built(FedAvg, **down), datasets(), initial=start, **how)
    summed, _ = federate(
        built(FedAvg, **down, secure_aggregation=secure), datasets(), initial=start, **how
    )
    torch.testing.assert_close(summed, plain, rtol=0, atol=1e-6)


def test_a_compressible_payload_needs_a_known_shape():
    class Shapeless(ClientSide):
        sends = compressible = frozenset({"more"})

    with refused("more", "expected()"):
        compressed_shapes({"x": Shapeless()}, {})


@pytest.mark.parametrize(
    "make",
    [
        partial(built, Average),
        partial(built, FedAvg, observers=[ClientSnapshots(Path("clients"))]),
        partial(built, FedAsync, system=Constant()),
    ],
)
def test_models_of_clients_that_start_from_a_rounded_one_are_not_fused(make):
    """They send y_i - C(x), and x + (y_i - C(x)) is no y_i: int4 moved a bias by 29 %."""
    make(compression=Compression(up=Int4()))
    with refused("compression.down"):
        make(compression=Compression(down="int4"))
