"""SecAgg+ rounds: what they sum, what the server gets to see, and clients that are lost in them."""

import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedhet.strategies.base import Reads, RefusedReplyError, Reply, ServerSide
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.feddw import FedDW
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.secure.reply_vector import Layout
from fedhet.strategies.modes.secure.shares import CHECK_SHARES, UNREADABLE
from fedhet.strategies.modes.systems import Constant
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.scaffold import SCAFFOLD
from fedhet.strategies.statistics.soft_labels import SOFT_LABELS
from fedhet.strategies.wire.border import Expected, Sender, decode
from tests.refused import refused
from tests.strategies.labelled import Biasless, blobs, train
from tests.strategies.sides import built

SECURE = SecAggPlus(max_examples=50)
VECTORS = Stage.COLLECT_MASKED_VECTORS
assert_close = partial(torch.testing.assert_close, rtol=0)
ANSWERS = {  # which key tells the five exchanges' answers
    Key.PUBLIC_KEY_1: Stage.SETUP,
    Key.DESTINATION_LIST: Stage.SHARE_KEYS,
    UNREADABLE: CHECK_SHARES,
    Key.MASKED_PARAMETERS: VECTORS,
    Key.SHARE_LIST: Stage.UNMASK,
}


def bound(secure: SecAggPlus = SECURE) -> float:
    """Return by how much a parameter of a round can be off: a step, over the mean weight."""
    weight = sum(len(data) for data in blobs()) / 4 / secure.max_examples
    return 2.0 * secure.step(4) / weight + 1e-6  # twice: the weights are rounded, too


def answered(message: Message) -> str:
    if message.has_error():
        return ""
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    return next((stage for key, stage in ANSWERS.items() if key in configs), "")


def losing(*lost: tuple[int, str]):
    stages = dict(lost)

    def tamper(message: Message) -> Message | None:
        stage = stages.get(message.metadata.src_node_id - 1000)
        plain = message.has_content() and "update" in message.content
        return None if stage and (plain or answered(message) == stage) else message

    return tamper


@pytest.mark.slow
def test_fewer_steps_are_coarser_and_still_within_the_bound():
    coarse = SecAggPlus(max_examples=50, clipping_range=2.0, quantization_range=1 << 12)
    expected, _ = train(built(FedAvg, local_lr=0.1), rounds=1)
    found, _ = train(built(FedAvg, local_lr=0.1, secure_aggregation=coarse), rounds=1)
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert 0.05 * coarse.step(4) < worst < bound(coarse)


@pytest.mark.slow
def test_a_class_that_nobody_holds_keeps_its_row():
    data = blobs()
    for client in data:
        client.labels[client.labels == 1] = 0
    odd = SecAggPlus(max_examples=49, clipping_range=3.3)
    strategy = built(FedDW, mu=0.5, local_lr=0.1, secure_aggregation=odd)
    train(strategy, rounds=1, data=data)
    matrix = strategy.server_sides["soft_labels"].broadcast(0)[SOFT_LABELS]["means"]
    assert matrix[1].tolist() == [0.0, 1.0, 0.0]
    assert matrix[[0, 2]].sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)


def global_states() -> tuple:
    numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return random.getstate(), numpy["key"].tolist(), numpy["pos"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_states():
    before = global_states()
    strategies = (built(FedAvg, local_lr=0.1, secure_aggregation=SECURE) for _ in range(2))
    assert_close(*(train(strategy, rounds=1)[0] for strategy in strategies), atol=0.0)
    assert global_states() == before


@pytest.mark.slow
def test_the_server_never_sees_a_single_update():
    seen, plain = [], {}
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    params, _ = train(strategy, rounds=1, tamper=lambda m: seen.append(m) or m)
    layout = Layout.of_round(
        strategy.client_sides, strategy.server_step, params, SECURE.max_examples
    )

    def keep(message: Message) -> Message:
        client = message.metadata.src_node_id - 1000
        if message.has_content() and "update" in message.content:
            plain[client] = decode(message, client, Expected(params, {client: Sender()}))
        return message

    train(built(FedAvg, local_lr=0.1), rounds=1, tamper=keep)
    rounds, roll_call = ([m for m in seen if bool(answered(m)) == asked] for asked in (True, False))
    assert len(rounds) == 20  # four clients, five exchanges
    assert all(set(message.content) == {RECORD_KEY_CONFIGS} for message in rounds)
    assert all(message.content["client"]["num-examples"] == 0 for message in roll_call)
    vectors = [m for m in rounds if answered(m) == VECTORS]
    assert len(vectors) == 4
    for message in vectors:
        configs = message.content[RECORD_KEY_CONFIGS]
        assert set(configs) == {Key.MASKED_PARAMETERS}
        factor, *masked = np.frombuffer(configs[Key.MASKED_PARAMETERS], np.uint32)
        assert factor != SECURE.steps(4)  # the weight is masked, too
        vector = layout.pack(plain[message.metadata.src_node_id - 1000])
        numbers = (vector + SECURE.clipping_range) / SECURE.step(4)
        assert not np.isclose(masked, numbers, atol=2).any()
        uniform = np.array(masked) / 2.0**32
        assert uniform.mean() == pytest.approx(0.5, abs=5 / math.sqrt(12 * len(uniform)))
        assert abs(np.corrcoef(uniform, vector)[0, 1]) < 5 / math.sqrt(len(uniform))


def changing(client: int, stage: str, change: Callable):
    key = next(key for key, at in ANSWERS.items() if at == stage)

    def tamper(message: Message) -> Message:
        if message.metadata.src_node_id == 1000 + client and answered(message) == stage:
            configs = ConfigRecord({**message.content[RECORD_KEY_CONFIGS]})
            configs[key] = change(configs[key])
            message.content = RecordDict({RECORD_KEY_CONFIGS: configs})
        return message

    return tamper


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*ANSWERS.values()])
def test_a_lost_or_unreadable_answer_costs_that_client_only(stage):
    """At the last exchange its vector is in the sum already."""
    lost = losing((2, stage))
    in_the_sum = stage == Stage.UNMASK
    plain = (lambda message: message) if in_the_sum else lost
    expected, _ = train(built(FedAvg, local_lr=0.1), rounds=1, tamper=plain)
    unreadable = changing(2, stage, lambda _: 7 if stage == Stage.SETUP else [b"nothing"])
    for tamper in (lost, unreadable):
        strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
        found, [*_, report] = train(strategy, rounds=1, tamper=tamper)
        assert_close(found, expected, atol=bound())
        assert list(report.clients) == ([0, 1, 2, 3] if in_the_sum else [0, 1, 3])
        (failure,) = report.failures
        assert failure.startswith("client 2")
    assert f"its answer at {stage!r} cannot be read" in failure


@pytest.mark.slow
def test_two_clients_lost_at_different_exchanges_with_five():
    lost = losing((1, Stage.SHARE_KEYS), (3, VECTORS))
    results = []
    for secure in (None, SECURE):
        strategy = built(SCAFFOLD, local_lr=0.1, secure_aggregation=secure)
        found, reports = train(strategy, rounds=2, data=blobs(5), tamper=lost)
        results.append(found)
        assert list(reports[-1].clients) == [0, 2, 4]
        assert strategy.state.committed == {0: 2, 2: 2, 4: 2}
    assert_close(*results, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (losing((1, VECTORS), (2, VECTORS)), "'collect masked vectors' 2 clients were left"),
        (changing(0, VECTORS, lambda data: bytes(len(data))), "the sum of clients' vectors"),
    ],
)
def test_without_a_sum_the_model_stays_and_the_reason_is_said(tamper, reason):
    strategy = built(FedAvg, secure_aggregation=SecAggPlus(reconstruction_threshold=0.8))
    found, reports = train(strategy, rounds=1, tamper=tamper)
    start = Biasless().state_dict()
    assert_close(found, {name: start[name] for name in found}, atol=0.0)
    assert any(reason in failure for failure in reports[-1].failures)
    assert strategy.state.failed_rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*ANSWERS.values()])
def test_two_clients_are_never_summed_alone(stage):
    """From the sum and its own part each would know the other's; two of three share every key."""
    strategy = built(FedAvg, secure_aggregation=SECURE)
    found, reports = train(strategy, rounds=1, data=blobs(3), tamper=losing((1, stage)))
    if stage == Stage.UNMASK:  # its vector is in the sum already
        assert list(reports[-1].clients) == [0, 1, 2]
        return
    start = Biasless().state_dict()
    assert_close(found, {name: start[name] for name in found}, atol=0.0)
    assert any("2 clients were left: a sum needs 3" in one for one in reports[-1].failures)


@pytest.mark.slow
def test_a_client_does_not_send_nan():
    data = blobs()
    data[1].inputs[0, 0] = math.nan
    found, reports = train(
        built(FedAvg, local_lr=0.1, secure_aggregation=SECURE), rounds=1, data=data
    )
    assert list(reports[-1].clients) == [0, 2, 3]
    assert "NaN or Inf" in reports[-1].failures[0]
    assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.slow
def test_what_is_cut_off_is_said_and_a_metric_that_was_cut_is_no_figure(caplog):
    """Client 1 alone has a loss that does not fit: the mean of the others' would look like one."""
    data = blobs()
    data[1].inputs *= 1e4
    key = "strategy.secure_aggregation.clipping_range=8"
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
        _, [*_, report] = train(strategy, rounds=1, data=data)
    assert report.metrics["clipped-share"] > 0.01
    assert "train-loss" not in report.metrics
    assert "received-accuracy" in report.metrics
    said = [one.message for one in caplog.records if key in one.message]
    assert len(said) == 1
    assert "train-loss" in said[0]
    caplog.clear()
    _, [*_, report] = train(built(FedAvg, local_lr=0.1, secure_aggregation=SECURE), rounds=1)
    assert report.metrics["clipped-share"] == 0.0
    assert "train-loss" in report.metrics
    assert "clipping_range" not in caplog.text


@pytest.mark.slow
def test_a_step_size_that_would_be_cut_off_is_refused_by_the_client():
    low = SecAggPlus(max_examples=50, clipping_range=1.0)
    _, [*_, report] = train(built(FedAvg, local_lr=1.1, secure_aggregation=low), rounds=1)
    assert len(report.failures) == 4
    assert all("clipping_range=1" in failure for failure in report.failures)


def test_a_client_refuses_settings_that_are_not_the_recipes():
    """Threshold 2 of 5 would let a server that loses three clients read one."""
    agreed = {
        **{Key.STAGE: Stage.SETUP, Key.SAMPLE_NUMBER: 5, Key.SHARE_NUMBER: 5, Key.THRESHOLD: 3},
        **{Key.CLIPPING_RANGE: SECURE.clipping_range, Key.TARGET_RANGE: SECURE.steps(5)},
        **{Key.MOD_RANGE: 1 << 32, Key.MAX_WEIGHT: 1.0},
    }

    def asked(**changes) -> Message:
        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({**agreed, **changes})})
        return Message(content, dst_node_id=1, message_type="train")

    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = partial(SECURE.reply, context=context, train=None, layout=None, seed=None)
    assert Key.PUBLIC_KEY_1 in reply(asked()).content[RECORD_KEY_CONFIGS]
    fewer_shares = {Key.SHARE_NUMBER: 3, Key.THRESHOLD: 2}  # which fit together
    two_clients = {Key.SAMPLE_NUMBER: 2, Key.TARGET_RANGE: SECURE.steps(2)}
    for change in ({Key.THRESHOLD: 2}, fewer_shares, two_clients, {Key.CLIPPING_RANGE: 1.0}):
        with pytest.raises(RefusedReplyError, match="not the recipe's"):
            reply(asked(**change))


class Reader(ServerSide):
    def receive(self, params, replies):
        self.first = replies[0]
        return replies


class Watcher:
    key = "watcher"

    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def __call__(self, params, total, replies, cohort):
        pass


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ({"observers": [Watcher(Reads.REPLIES)]}, "watcher Watcher"),
        ({"client_metrics": ClientMetrics(asked=True)}, "evaluation.clients"),
        ({"client_metrics": ClientMetrics(per_client=True)}, "evaluation.per_client=true"),
        ({"system": Constant()}, "system strategy/secure_aggregation"),
        (
            {"server_sides": {"reader": Reader()}},
            "server_sides.reader Reader",
        ),
    ],
)
def test_parts_that_read_single_replies_are_refused_and_why(slots, named):
    with refused(*named.split()):
        built(**slots, secure_aggregation=SECURE)
    reads_sums = {"server_sides": {"keeper": ServerSide()}, "observers": [Watcher(Reads.SUM)]}
    built(**reads_sums, secure_aggregation=SECURE)


def test_a_client_with_more_examples_than_the_recipe_allows_is_refused():
    with refused("max_examples=10"):
        SecAggPlus(max_examples=10).check_client(11)


def test_rounds_of_two_clients_are_refused_before_the_first():
    SecAggPlus().check(3, 3)
    with refused("clients=2", "strategy/secure_aggregation=none"):
        SecAggPlus().check(2, 2)
    third = FixedSizeSampler(participation=0.34)
    with refused("clients=6", "participation", "strategy/secure_aggregation=none"):
        train(built(FedAvg, sampler=third, secure_aggregation=SECURE), rounds=1, data=blobs(6))
    too_fine = SecAggPlus(quantization_range=1 << 30)
    with refused("quantization_range"):
        too_fine.check(8, 5)


def test_the_sum_uses_32_bits_and_a_majority_can_unmask():
    """A majority, so that nobody can ask one half for a mask and the other half for a key."""
    secure, least = SecAggPlus(), SecAggPlus(reconstruction_threshold=0.5001)
    for size in (2, 3, 4, 10, 16, 1000, 1024):
        steps = secure.steps(size)
        assert size * steps < 1 << 32
        assert steps == 1 << 30 or 2 * size * steps >= 1 << 32
        with refused("quantization_range"):
            SecAggPlus(quantization_range=1 << 30).steps(max(size, 5))
    for one in (secure, least):
        assert all(n / 2 < one._setup(n)["threshold"] <= n for n in range(3, 200))


def reply(client: int, n: int, value: float) -> Reply:
    update = {"w": torch.tensor([value, -value])}
    delta, counts = {"w": torch.tensor([value + 1])}, {"c": torch.tensor([float(n)])}
    return Reply(
        *(client, n, 2 * n, 0.1 * n, update, {"delta": delta, "counts": counts}),
        metrics={"train-loss": value, "personal-accuracy": value / 4} if client else {},
        buffers={"mean": torch.tensor([10 * value])},
        per_example=frozenset({"counts"}),
    )


@pytest.mark.parametrize(("weighting", "expected"), [("examples", 4.0), ("clients", 3.0)])
def test_the_mean_reply_by_hand(weighting, expected):
    """n = 1, 3 and values 1, 5: (1 + 15) / 4 = 4 or 3; client 0 has measured nothing."""
    replies = [reply(0, 1, 1.0), reply(1, 3, 5.0)]
    layout = Layout.of(replies[0], weighting, max_examples=8)
    vectors = [layout.pack(r) for r in replies]
    assert len(layout) == len(vectors[0]) == 4 + 2 + 1 + 1 + 1 + 3 * 8
    mean = layout.unpack(sum(vectors) / 2, 2, 1e-9)
    assert mean.update["w"].tolist() == [expected, -expected]
    assert mean.buffers["mean"].item() == 40.0
    payloads = {"delta": {"w": torch.tensor([4.0])}, "counts": {"c": torch.tensor([2.0])}}
    torch.testing.assert_close(mean.payloads, payloads)
    assert (mean.num_examples, mean.num_steps, mean.lr_sum) == (2, 4, pytest.approx(0.2))
    found = {name: mean.metrics.get(name) for name in (*replies[1].metrics, "received-loss")}
    assert found == {**replies[1].metrics, "received-loss": None}
    cut = layout.too_large(replies[1], limit=1.5)
    assert cut == ["train-loss"]  # 3/8 of 5
    without = layout.unpack((vectors[0] + layout.pack(replies[1], cut)) / 2, 2, 1e-9).metrics
    assert without.keys() == mean.metrics.keys() - {"train-loss"}
    for wrong in (1.5 * vectors[0], vectors[0][:-1]):
        with refused(f"mean of {len(layout)} numbers", kind=ValueError):
            layout.unpack(wrong, 1, 1e-6)


def test_a_long_sum_of_step_sizes_is_not_cut_off():
    """130 and 260 steps of .1: 13 and 26, where numbers are cut off at 8."""
    steps = enumerate((130, 260))
    replies = [replace(reply(i, i + 1, 1.0), num_steps=n, lr_sum=n / 10) for i, n in steps]
    layout = Layout.of(replies[0], "clients", max_examples=50)
    vectors = [layout.pack(each) for each in replies]
    assert max(abs(vector[:4]).max() for vector in vectors) < SecAggPlus().clipping_range
    assert layout.unpack(sum(vectors) / 2, 2, 1e-9).lr_sum == pytest.approx(19.5)


def test_flower_still_draws_masks_from_32_bits_of_a_seed():
    """docs/privacy.md says so: another seed with the same xor of its words gives the same mask."""
    seed, swapped = bytes(range(32)), bytes([*range(4, 8), *range(4), *range(8, 32)])
    masks = [pseudo_rand_gen(one, 1 << 32, [(5,)])[0] for one in (seed, swapped)]
    assert (masks[0] == masks[1]).all()
