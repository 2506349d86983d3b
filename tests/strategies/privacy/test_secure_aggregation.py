"""SecAgg+ rounds: what they sum, what the server gets to see, and clients that are lost in them."""

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from torch.nn import functional as F

from common.errors import ConfigError
from strategies.base import RefusedReplyError, Reply, ServerSide
from strategies.components.aggregators import NormMean
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.fedavg import FedAvg
from strategies.fedcm import FedCM
from strategies.feddw import FedDW
from strategies.fedproto import FedProto
from strategies.fedpvr import FedPVR
from strategies.privacy.checks import reply_layout
from strategies.privacy.reply_vector import Layout
from strategies.privacy.secure_aggregation import SecAggPlus
from strategies.round.federated import FederatedStrategy
from strategies.round.records import METRICS, scalars, to_tensors
from strategies.scaffold import SCAFFOLD
from strategies.statistics.soft_labels import SOFT_LABELS
from tests.federation import federate
from tests.strategies.labelled import Biasless, train
from tests.strategies.test_reductions import blobs

SECURE = SecAggPlus(max_examples=50)
assert_close = partial(torch.testing.assert_close, rtol=0)
ANSWERS = {  # which key tells the four exchanges' answers
    Key.PUBLIC_KEY_1: Stage.SETUP,
    Key.DESTINATION_LIST: Stage.SHARE_KEYS,
    Key.MASKED_PARAMETERS: Stage.COLLECT_MASKED_VECTORS,
    Key.SHARE_LIST: Stage.UNMASK,
}


def bound(weighting: str, secure: SecAggPlus = SECURE, size: int = 4) -> float:
    """Return by how much a parameter of a round can be off: a step, over the mean weight."""
    examples = sum(len(data) for data in blobs(4)) / 4 / secure.max_examples
    weight = examples if weighting == "examples" else 1.0
    return 2.0 * secure.step(size) / weight + 1e-6  # twice: the weights are rounded, too


def answered(message: Message) -> str:
    """Return which exchange a reply belongs to; "" for none of the four."""
    if message.has_error():
        return ""
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    return next((stage for key, stage in ANSWERS.items() if key in configs), "")


def losing(*lost: tuple[int, str]):
    """Return a tamper that loses clients' answers at an exchange; in a plain round, their reply."""
    stages = dict(lost)

    def tamper(message: Message) -> Message | None:
        client = message.metadata.src_node_id - 1000
        if client in stages:
            plain = message.has_content() and "update" in message.content
            if plain or answered(message) == stages[client]:
                return None
        return message

    return tamper


METHODS = {
    "fedavg": (FedAvg, "examples"),
    "scaffold": (SCAFFOLD, "clients"),
    "fedpvr": (lambda **how: FedPVR(layers="last:1", **how), "clients"),
    "fedcm": (FedCM, "clients"),
    "feddw": (lambda **how: FedDW(0.5, **how), "examples"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_round_equals_the_plain_one_up_to_quantisation(method):
    build, weighting = METHODS[method]
    plain, summed = build(local_lr=0.1), build(local_lr=0.1, secure_aggregation=SECURE)
    expected, reports = train(plain, rounds=1)
    found, secured = train(summed, rounds=1)
    assert_close(found, expected, atol=bound(weighting))
    states = (strategy.snapshot().tensors.values() for strategy in (summed, plain))
    for mine, theirs in zip(*states, strict=True):
        for name in (name for name in theirs if theirs[name].is_floating_point()):
            # c and the momentum are divided by a sum of step sizes of .6
            assert_close(mine[name], theirs[name], atol=5e-5)
    assert not secured[-1].failures
    for name in ("train-loss", "received-loss", "num-examples", "num-steps"):
        assert secured[-1].metrics[name] == pytest.approx(reports[-1].metrics[name], abs=1e-5)


def test_fewer_steps_are_coarser_and_still_within_the_bound():
    coarse = SecAggPlus(max_examples=50, clipping_range=2.0, quantization_range=1 << 12)
    expected, _ = train(FedAvg(local_lr=0.1), rounds=1)
    found, _ = train(FedAvg(local_lr=0.1, secure_aggregation=coarse), rounds=1)
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert 0.05 * coarse.step(4) < worst < bound("examples", coarse)


@pytest.mark.slow
def test_a_class_that_nobody_holds_keeps_its_row():
    """Its sums and counts are exact zeros, whatever is rounded around them."""
    data = blobs(4)
    for client in data:
        client.labels[client.labels == 1] = 0
    odd = SecAggPlus(max_examples=49, clipping_range=3.3)
    strategy = FedDW(0.5, local_lr=0.1, secure_aggregation=odd)
    federate(strategy, data, model=Biasless, loss=F.cross_entropy, rounds=1)
    matrix = strategy.server_sides["soft_labels"].broadcast(0)[SOFT_LABELS]["means"]
    assert matrix[1].tolist() == [0.0, 1.0, 0.0]
    assert matrix[[0, 2]].sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_states():
    drawn, params = [], []
    for _ in range(2):
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)
        params.append(train(FedAvg(local_lr=0.1, secure_aggregation=SECURE), rounds=1)[0])
        drawn.append((np.random.rand(), random.random()))  # noqa: NPY002
    assert_close(*params, atol=0.0)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    assert drawn == 2 * [(np.random.rand(), random.random())]  # noqa: NPY002


@pytest.mark.slow
def test_the_server_never_sees_a_single_update():
    """Of a client it gets keys, ciphertexts, shares and one vector that looks like noise."""
    seen: list[Message] = []
    plain: dict[int, Reply] = {}
    secure = SecAggPlus(max_examples=50)
    strategy = FedAvg(local_lr=0.1, secure_aggregation=secure)
    params, _ = train(strategy, rounds=1, tamper=lambda m: seen.append(m) or m)
    layout = reply_layout(strategy.client_sides, strategy.server_step, secure, params)
    train(FedAvg(local_lr=0.1), rounds=1, tamper=lambda m: keep(m, plain))
    rounds = [message for message in seen if answered(message)]
    assert len(rounds) == 16  # four clients, four exchanges
    assert all(set(message.content) == {RECORD_KEY_CONFIGS} for message in rounds)
    for message in (m for m in seen if not answered(m)):  # the roll call
        assert message.content["client"]["num-examples"] == 0
    vectors = [m for m in rounds if answered(m) == Stage.COLLECT_MASKED_VECTORS]
    assert len(vectors) == 4
    for message in vectors:
        configs = message.content[RECORD_KEY_CONFIGS]
        assert set(configs) == {Key.MASKED_PARAMETERS}
        factor, masked = (bytes_to_ndarray(data) for data in configs[Key.MASKED_PARAMETERS])
        assert factor.item() != secure.steps(4)  # the weight is masked, too
        vector = layout.pack(plain[message.metadata.src_node_id - 1000])
        numbers = (vector + secure.clipping_range) / secure.step(4)
        assert not np.isclose(masked, numbers, atol=2).any()
        uniform = masked / 2.0**32
        assert uniform.mean() == pytest.approx(0.5, abs=5 / math.sqrt(12 * len(uniform)))
        assert abs(np.corrcoef(uniform, vector)[0, 1]) < 5 / math.sqrt(len(uniform))


def keep(message: Message, found: dict[int, Reply]) -> Message:
    """Read a plain reply as the client packed it."""
    if message.has_content() and "update" in message.content:
        metrics = scalars(message.content[METRICS])
        keys = ("partition-id", "num-examples", "num-steps")
        client, examples, steps = (int(metrics[key]) for key in keys)
        update = to_tensors(message.content["update"])
        found[client] = Reply(client, examples, steps, metrics["lr-sum"], update, metrics=metrics)
    return message


def unreadable(client: int, stage: str):
    """Return a tamper that spoils a client's answer at an exchange."""

    def tamper(message: Message) -> Message:
        if message.metadata.src_node_id == 1000 + client and answered(message) == stage:
            key = next(key for key, at in ANSWERS.items() if at == stage)
            configs = ConfigRecord({**message.content[RECORD_KEY_CONFIGS]})
            configs[key] = [b"nothing"] if stage != Stage.SETUP else 7
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
    expected, _ = train(FedAvg(local_lr=0.1), rounds=1, tamper=plain)
    for tamper in (lost, unreadable(2, stage)):
        strategy = FedAvg(local_lr=0.1, secure_aggregation=SECURE)
        found, [*_, report] = train(strategy, rounds=1, tamper=tamper)
        assert_close(found, expected, atol=bound("examples"))
        assert list(report.clients) == ([0, 1, 2, 3] if in_the_sum else [0, 1, 3])
        assert len(report.failures) == (0 if in_the_sum else 1)
    if not in_the_sum:
        assert f"its answer at {stage!r} cannot be read" in report.failures[0]


@pytest.mark.slow
def test_two_clients_lost_at_different_exchanges_with_five():
    """One before it has shared its key, one after: its masks are taken off by its neighbours."""
    lost = losing((1, Stage.SHARE_KEYS), (3, Stage.COLLECT_MASKED_VECTORS))
    results = []
    for secure in (None, SecAggPlus(max_examples=50)):
        strategy = SCAFFOLD(local_lr=0.1, secure_aggregation=secure)
        found, reports = federate(
            strategy,
            blobs(5),
            model=Biasless,
            loss=F.cross_entropy,
            rounds=2,
            options=LocalTrainingConfig(batch_size=8),
            tamper=lost,
        )
        results.append(found)
        assert list(reports[-1].clients) == [0, 2, 4]
        assert strategy.state.committed == {0: 2, 2: 2, 4: 2}
    assert_close(*results, atol=1e-4)


def wrong_shares(message: Message) -> Message:
    """Change client 0's shares to well-formed bytes that reconstruct another seed."""
    if answered(message) == Stage.UNMASK and message.metadata.src_node_id == 1000:
        configs = ConfigRecord({**message.content[RECORD_KEY_CONFIGS]})
        shares = configs[Key.SHARE_LIST]
        configs[Key.SHARE_LIST] = [s[:4] + bytes([s[4] ^ 1]) + s[5:] for s in shares]
        message.content = RecordDict({RECORD_KEY_CONFIGS: configs})
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (
            losing((1, Stage.COLLECT_MASKED_VECTORS), (2, Stage.COLLECT_MASKED_VECTORS)),
            "'collect masked vectors' 2 clients were left",
        ),
        (wrong_shares, "no secure sum"),
    ],
)
def test_without_a_sum_the_model_stays_and_the_reason_is_said(tamper, reason):
    secure = SecAggPlus(reconstruction_threshold=0.8, max_examples=50)
    strategy = FedAvg(local_lr=0.1, secure_aggregation=secure)
    found, reports = train(strategy, rounds=1, tamper=tamper)
    start = Biasless().state_dict()
    assert_close(found, {name: start[name] for name in found}, atol=0.0)
    assert all(reason in failure for failure in reports[-1].failures)
    assert strategy.state.failed_rounds == 1


@pytest.mark.slow
def test_a_client_does_not_send_nan_and_counts_what_is_cut_off():
    data = blobs(4)
    data[1].inputs[0, 0] = math.nan
    strategy = FedAvg(local_lr=0.1, secure_aggregation=SECURE)
    found, reports = federate(strategy, data, model=Biasless, loss=F.cross_entropy, rounds=1)
    assert list(reports[-1].clients) == [0, 2, 3]
    assert "NaN or Inf" in reports[-1].failures[0]
    assert all(bool(value.isfinite().all()) for value in found.values())
    tight = SecAggPlus(max_examples=50, clipping_range=1e-3)
    _, reports = train(FedAvg(local_lr=0.1, secure_aggregation=tight), rounds=1)
    assert not reports[-1].metrics  # the constant 1 does not fit either: no sum
    fair = SecAggPlus(max_examples=50, clipping_range=1.0)
    _, reports = train(FedAvg(local_lr=1.1, secure_aggregation=fair), rounds=1)
    assert 0 < reports[-1].metrics["clipped-share"] < 0.2


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
    never = {"train": None, "layout": None, "seed": None}
    answer = SECURE.reply(asked(), context, **never)
    assert Key.PUBLIC_KEY_1 in answer.content[RECORD_KEY_CONFIGS]
    for change in ({Key.THRESHOLD: 2}, {Key.SHARE_NUMBER: 3}, {Key.CLIPPING_RANGE: 1.0}):
        with pytest.raises(RefusedReplyError, match="not the recipe's"):
            SECURE.reply(asked(**change), context, **never)


def test_methods_that_read_single_replies_are_refused_and_why():
    with pytest.raises(ConfigError, match=r"NormMean: it needs the norm of every update.*uniform"):
        FedAvg(aggregator=NormMean(), secure_aggregation=SECURE)
    with pytest.raises(ConfigError, match=r"transforms .*one by one"):
        FedAvg(transforms=[lambda params, replies: replies], secure_aggregation=SECURE)
    with pytest.raises(ConfigError, match=r"diagnostics .*one by one"):
        FedAvg(observers=[lambda params, replies, cohort: None], secure_aggregation=SECURE)
    with pytest.raises(ConfigError, match=r"evaluation\.clients"):
        FedAvg(evaluate_on_clients=True, secure_aggregation=SECURE)
    with pytest.raises(ConfigError, match=r"prototype_sums.*no shape"):
        train(FedProto(secure_aggregation=SECURE), rounds=1)
    with pytest.raises(ConfigError, match=r"clients=2"):
        federate(FedAvg(secure_aggregation=SECURE), blobs(2), model=Biasless, rounds=1)

    class Reader(ServerSide):
        def reduce(self, replies, update, cohort):
            self.first = replies[0]

    with pytest.raises(ConfigError, match=r"Reader: it reads the clients' replies one by one"):
        FederatedStrategy(server_sides={"reader": Reader()}, secure_aggregation=SECURE)
    FederatedStrategy(server_sides={"keeper": ServerSide()}, secure_aggregation=SECURE)


def test_a_value_out_of_range_is_refused_by_its_key():
    for name, value in (
        *(("num_shares", 0.0), ("num_shares", 4), ("reconstruction_threshold", 0.5)),
        *(("clipping_range", 0.0), ("quantization_range", 1), ("max_examples", 0)),
    ):
        with pytest.raises(ConfigError, match=rf"strategy\.secure_aggregation\.{name}="):
            SecAggPlus(**{name: value})
    with pytest.raises(ConfigError, match="max_examples=10"):
        SecAggPlus(max_examples=10).check_client(11)


def test_the_sum_uses_32_bits_and_a_majority_can_unmask():
    """A majority, so that nobody can ask one half for a mask and the other half for a key."""
    for size in (2, 3, 4, 10, 16, 1000, 1024):
        steps = SecAggPlus().steps(size)
        assert size * steps < 1 << 32
        assert steps == 1 << 30 or 2 * size * steps >= 1 << 32
        with pytest.raises(ConfigError, match="quantization_range"):
            SecAggPlus(quantization_range=1 << 30).steps(max(size, 5))
    for size in range(3, 200):
        assert max(2, round(SecAggPlus().reconstruction_threshold * size)) > size / 2


def reply(client: int, n: int, value: float) -> Reply:
    update = {"w": torch.tensor([value, -value])}
    delta, counts = {"w": torch.tensor([value + 1])}, {"c": torch.tensor([float(n)])}
    return Reply(
        *(client, n, 2 * n, 0.1 * n, update, {"delta": delta, "counts": counts}),
        metrics={"train-loss": value, "personal-accuracy": value / 4} if client else {},
        buffers={"mean": torch.tensor([10 * value])},
        per_example=frozenset({"counts"}),
    )


def test_a_long_sum_of_step_sizes_is_not_cut_off():
    """130 and 260 steps of .1: 13 and 26, where numbers are cut off at 8."""
    first, second = reply(0, 1, 1.0), reply(1, 3, 5.0)
    replies = [
        replace(first, num_steps=130, lr_sum=13.0),
        replace(second, num_steps=260, lr_sum=26.0),
    ]
    layout = Layout.of(replies[0], "clients", max_examples=50)
    vectors = [layout.pack(each) for each in replies]
    assert max(abs(vector[:4]).max() for vector in vectors) < SecAggPlus().clipping_range
    assert layout.unpack(sum(vectors) / 2, 2, 1e-9).lr_sum == pytest.approx(19.5)


@pytest.mark.parametrize(("weighting", "expected"), [("examples", 4.0), ("clients", 3.0)])
def test_the_mean_reply_by_hand(weighting, expected):
    """n = 1, 3 and values 1, 5: (1 + 15) / 4 = 4 or 3; client 0 has measured nothing."""
    replies = [reply(0, 1, 1.0), reply(1, 3, 5.0)]
    layout = Layout.of(replies[0], weighting, max_examples=8)
    vectors = [layout.pack(r) for r in replies]
    assert len(layout) == len(vectors[0]) == 4 + 2 + 1 + 1 + 1 + 2 * 8
    mean = layout.unpack(sum(vectors) / 2, 2, 1e-9)
    assert mean.update["w"].tolist() == [expected, -expected]
    assert mean.buffers["mean"].item() == 40.0
    assert mean.payloads["delta"]["w"].item() == 4.0
    assert mean.payloads["counts"]["c"].item() == 2.0
    assert (mean.num_examples, mean.num_steps, mean.lr_sum) == (2, 4, pytest.approx(0.2))
    assert mean.metrics["train-loss"] == pytest.approx(5.0)
    assert mean.metrics["personal-accuracy"] == pytest.approx(1.25)
    assert "received-loss" not in mean.metrics
    for wrong in (1.5 * vectors[0], vectors[0][:-1]):
        with pytest.raises(ValueError, match="no mean"):
            layout.unpack(wrong, 1, 1e-6)
