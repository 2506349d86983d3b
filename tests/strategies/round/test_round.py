"""The round: refusals, lost replies, client state, resume, roll call."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from client_app.state import ContextStateStore, FolderStateStore
from common.errors import ConfigError
from strategies.base import ClientSide, ServerSide
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.components.samplers import FixedSizeSampler
from strategies.fedavg import FedAvg
from strategies.round.federated import FederatedStrategy
from strategies.round.records import to_record, to_tensors
from strategies.round.registration import FederationConfig, register_clients
from strategies.scaffold import SCAFFOLD
from tests.federation import InProcessGrid, Regression, TensorBatches, federate, node_info

OPTIONS = LocalTrainingConfig(batch_size=4, epochs=1)


def clients(count: int = 3) -> list[TensorBatches]:
    generator = torch.Generator().manual_seed(5)
    return [
        TensorBatches(
            torch.randn(8, 2, generator=generator, dtype=torch.float64),
            torch.randn(8, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def run(strategy, *, rounds=3, count=3, **how):
    return federate(
        strategy,
        clients(count),
        model=lambda: Regression(2),
        rounds=rounds,
        options=OPTIONS,
        **how,
    )


def from_client(message: Message, client: int) -> bool:
    content = message.content if message.has_content() else RecordDict()
    metrics = content.metric_records.get("metrics", MetricRecord())
    return metrics.get("partition-id") == client


# ---- refused replies -----------------------------------------------------------------------------


def replace_record(name: str, change):
    """Return a tamper that edits one record of client 1's replies."""

    def tamper(reply: Message) -> Message:
        if from_client(reply, 1):
            record = change(reply.content[name])
            if record is None:
                del reply.content[name]
            else:
                reply.content[name] = record
        return reply

    return tamper


def with_value(value: float):
    def change(record: ArrayRecord) -> ArrayRecord:
        tensors = to_tensors(record)
        tensors["head.weight"][0, 1] = value
        return to_record(tensors)

    return change


def pickled(record: ArrayRecord) -> ArrayRecord:
    import io

    import numpy as np

    file = io.BytesIO()
    np.save(file, np.array([print], dtype=object), allow_pickle=True)
    return ArrayRecord({"head.weight": Array("O", (1,), "numpy.ndarray", file.getvalue())})


BAD_REPLIES = [
    ("update", with_value(math.nan), "'head.weight' holds NaN or Inf"),
    ("update", with_value(math.inf), "'head.weight' holds NaN or Inf"),
    ("update", lambda r: to_record({"head.weight": torch.zeros(1, 3)}), "shape (1, 3), expected"),
    ("update", lambda r: to_record({"other": torch.zeros(1, 2)}), "lacks the tensors"),
    ("update", lambda r: None, "lacks the payload 'update'"),
    ("update", pickled, "cannot be read"),
    ("control_variate_delta", lambda r: None, "lacks the payload 'control_variate_delta'"),
    ("control_variate_delta", with_value(math.nan), "holds NaN or Inf"),
    ("control_variate_delta", lambda r: to_record({"head.weight": torch.zeros(2)}), "has shape"),
    ("metrics", lambda r: MetricRecord({**r, "partition-id": 2}), "it names partition 2"),
    ("metrics", lambda r: MetricRecord({**r, "num-examples": 0}), "no example"),
    ("metrics", lambda r: MetricRecord({**r, "num-steps": 0}), "no step"),
    ("metrics", lambda r: MetricRecord({**r, "train-loss": math.nan}), "['train-loss'] are NaN"),
    ("metrics", lambda r: MetricRecord({"partition-id": 1}), "metrics lack"),
]


@pytest.mark.parametrize(("record", "change", "reason"), BAD_REPLIES)
def test_a_bad_reply_is_refused_by_name_and_the_round_goes_on(record, change, reason):
    """The others are aggregated as if client 1 had not been sampled."""
    params, reports = run(SCAFFOLD(), rounds=1, tamper=_keep_sender(record, change))
    assert list(reports[1].clients) == [0, 2]
    (failure,) = reports[1].failures
    assert failure.startswith("client 1: ")
    assert reason in failure
    expected, _ = run(
        SCAFFOLD(), rounds=1, tamper=lambda reply: None if from_client(reply, 1) else reply
    )
    assert torch.equal(params["head.weight"], expected["head.weight"])


def _keep_sender(record, change):
    tamper = replace_record(record, change)
    return lambda reply: tamper(reply) if _is_train(reply) else reply


def _is_train(reply: Message) -> bool:
    return reply.has_content() and "metrics" in reply.content


def test_a_lost_reply_is_counted():
    _, reports = run(
        FedAvg(), rounds=1, tamper=lambda reply: None if from_client(reply, 2) else reply
    )
    why = "no reply within 3600 s (runtime.round_timeout_seconds)"
    assert reports[1].failures == [f"client 2: {why}"]


def test_an_error_in_the_name_of_a_lost_node():
    """The SuperLink itself (node 1) answers for a node it has lost."""

    def tamper(reply: Message) -> Message:
        if from_client(reply, 2):
            asked = reply.metadata.reply_to_message_id
            reply = Message(Error(code=5, reason="Node Unavailable"), reply_to=reply)
            reply.metadata.__dict__["_src_node_id"] = 1
            reply.metadata.__dict__["_reply_to_message_id"] = asked
        return reply

    _, reports = run(FedAvg(), rounds=1, tamper=tamper)
    assert reports[1].failures == ["client 2: error 5: Node Unavailable"]


def test_too_few_replies_leave_the_model_as_it_was():
    """One of two rounds loses two of three replies; min_replies is 2."""
    fail = {"now": True}

    def tamper(reply: Message) -> Message | None:
        return None if fail["now"] and _is_train(reply) and not from_client(reply, 0) else reply

    strategy = FedAvg(federation=FederationConfig(min_replies=2, max_failed_rounds=2))
    params, reports = run(strategy, rounds=1, tamper=tamper)
    assert torch.equal(params["head.weight"], torch.zeros(1, 2, dtype=torch.float64))
    assert len(reports[1].failures) == 2


def test_failed_rounds_in_a_row_end_the_run():
    with pytest.raises(RuntimeError, match=r"2 rounds in a row.*min_replies=1.*client 0: no reply"):
        run(
            FedAvg(federation=FederationConfig(max_failed_rounds=2)),
            tamper=lambda reply: None if _is_train(reply) else reply,
        )


# ---- client state: versions follow the aggregated replies ----------------------------------------


@pytest.mark.parametrize("kind", ["context", "folder"])
def test_a_lost_reply_does_not_move_the_client_state(kind, tmp_path):
    """SCAFFOLD with client 1's round-2 reply lost equals one where it was never sampled."""

    class Absent(FixedSizeSampler):
        def sample(self, round: int, num_clients: int) -> list[int]:
            return [0, 2] if round == 2 else [0, 1, 2]

    def stores(name: str):
        if kind == "context":
            return {i: ContextStateStore(RecordDict()) for i in range(3)}
        return {i: FolderStateStore(tmp_path / name, i) for i in range(3)}

    strategy = SCAFFOLD(local_lr=0.1)

    def tamper(reply: Message) -> Message | None:
        return None if from_client(reply, 1) and strategy.state.round == 1 else reply

    lost, _ = run(strategy, rounds=4, stores=stores("lost"), tamper=tamper)
    absent, _ = run(SCAFFOLD(local_lr=0.1, sampler=Absent()), rounds=4, stores=stores("absent"))
    assert torch.equal(lost["head.weight"], absent["head.weight"])


@pytest.mark.parametrize("every", [1, 2])
def test_resume_equals_the_uninterrupted_run(every, tmp_path):
    """SCAFFOLD, half the clients a round, killed in round 5; the last checkpoint is older."""

    def strategy() -> SCAFFOLD:
        return SCAFFOLD(local_lr=0.1, sampler=FixedSizeSampler(0.5, seed=3))

    def stores(name: str):
        return {i: FolderStateStore(tmp_path / name, i) for i in range(4)}

    whole, _ = run(strategy(), rounds=8, count=4, stores=stores("whole"))

    saved = {}

    def until_five(report, arrays):
        if report.round and report.round % every == 0:
            saved["params"], saved["state"] = to_tensors(arrays), first.snapshot()
            first.state.mark_durable()
        return report.round == 5

    first = strategy()
    _run_with(first, until_five, stores("cut"))
    second = strategy()
    second.restore(saved["state"])
    assert second.state.round == (5 if every == 1 else 4)
    resumed, reports = run(second, rounds=8, count=4, stores=stores("cut"), initial=saved["params"])
    assert [report.round for report in reports] == list(range(second_start(every), 9))
    assert torch.equal(whole["head.weight"], resumed["head.weight"])


def second_start(every: int) -> int:
    return 6 if every == 1 else 5


def _run_with(strategy: FederatedStrategy, on_round, stores) -> None:
    """Run eight rounds with an observer of our own."""
    original = strategy.start

    def start(grid, arrays, num_rounds, on_round=on_round, **how):
        return original(grid, arrays, num_rounds=num_rounds, on_round=on_round, **how)

    strategy.start = lambda grid, arrays, num_rounds, on_round: start(grid, arrays, num_rounds)
    run(strategy, rounds=8, count=4, stores=stores)


def test_folder_store_keeps_what_may_be_asked_for(tmp_path):
    store = FolderStateStore(tmp_path, 7)
    for round in (1, 4, 6, 9):
        store.save("run", round, {"c": {"w": torch.tensor([float(round)])}}, keep={4})
    assert sorted(path.name for path in (tmp_path / "run" / "client-00007").iterdir()) == [
        "round-000004.safetensors",
        "round-000009.safetensors",
    ]
    assert store.load("run", 4)["c"]["w"].item() == 4.0
    assert store.load("run", 6) == {}
    assert store.load("other", 4) == {}


@pytest.mark.parametrize("experiment", ["../up", "a/b", "", ".hidden"])
def test_an_experiment_from_the_network_is_no_path(experiment, tmp_path):
    with pytest.raises(ValueError, match="no folder name"):
        FolderStateStore(tmp_path, 0).load(experiment, 1)


# ---- what travels --------------------------------------------------------------------------------


def test_bytes_are_those_of_the_arrays_as_serialised():
    """A (1, 2) float64 array is 16 bytes and a 128-byte header; SCAFFOLD sends two each way."""
    _, fedavg = run(FedAvg(), rounds=1)
    _, scaffold = run(SCAFFOLD(), rounds=1)
    assert (fedavg[1].bytes_down, fedavg[1].bytes_up) == (3 * 144, 3 * 144)
    assert (scaffold[1].bytes_down, scaffold[1].bytes_up) == (6 * 144, 6 * 144)


def test_personal_tensors_stay_and_survive():
    """The head never travels; each client goes on with its own."""
    from tests.strategies.test_reductions import Classifier, blobs

    stores = {i: ContextStateStore(RecordDict()) for i in range(2)}
    strategy = FedAvg(local_lr=0.1)
    params, _ = federate(
        strategy,
        blobs(2),
        model=Classifier,
        loss=torch.nn.functional.cross_entropy,
        rounds=3,
        stores=stores,
        personal="head.*",
    )
    assert sorted(params) == ["body.0.bias", "body.0.weight"]
    heads = [
        stores[i].load(strategy.state.experiment, 3)["personal"]["head.weight"] for i in range(2)
    ]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], Classifier().head.weight)


def test_batchnorm_statistics_are_averaged_by_examples_and_counters_stay():
    """Buffers skip the server optimiser: eta_g = 2 moves the weights twice as far, not them."""
    from torch import nn

    from strategies.components.server_optimizers import SGD

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
            self.head = nn.Linear(2, 1, bias=False, dtype=torch.float64)
            nn.init.zeros_(self.head.weight)

        def forward(self, inputs):
            features = self.norm(inputs)
            return features, self.head(features)

    datasets = clients(2)
    datasets[1] = TensorBatches(datasets[1].inputs[:4], datasets[1].labels[:4])
    buffers = ["norm.running_mean", "norm.running_var"]
    params, _ = federate(
        FedAvg(buffers=buffers, server_optimizer=SGD(lr=2.0), local_lr=0.1),
        datasets,
        model=Normed,
        rounds=1,
        options=LocalTrainingConfig(batch_size=8, epochs=1),
    )
    assert "norm.num_batches_tracked" not in params
    means = [0.1 * data.inputs.mean(0) for data in datasets]
    torch.testing.assert_close(params["norm.running_mean"], (8 * means[0] + 4 * means[1]) / 12)


# ---- needs and sends -----------------------------------------------------------------------------


class Needy(ClientSide):
    needs, sends = frozenset({"soft_labels"}), frozenset({"sums"})


class Giver(ServerSide):
    needs, sends = frozenset({"sums"}), frozenset({"soft_labels"})


class Corrector(ClientSide):
    def correct(self, grads, context) -> None:
        """Edit nothing, but say that it would."""


def test_a_payload_that_nobody_sends_is_refused():
    with pytest.raises(ConfigError, match=r"client_sides\.x needs the payloads \['soft_labels'\]"):
        FederatedStrategy(client_sides={"x": Needy()})
    with pytest.raises(ConfigError, match=r"server_sides\.y needs the payloads \['sums'\]"):
        FederatedStrategy(server_sides={"y": Giver()})
    FederatedStrategy(client_sides={"x": Needy()}, server_sides={"y": Giver()})


def test_stacked_corrections_are_refused_unless_allowed():
    sides = {"a": Corrector(), "b": Corrector()}
    with pytest.raises(ConfigError, match=r"\['a', 'b'\] all correct .*allow_stacked_corrections"):
        FederatedStrategy(client_sides=sides)
    FederatedStrategy(client_sides=sides, allow_stacked_corrections=True)


def test_two_sides_with_one_payload_are_refused():
    with pytest.raises(ConfigError, match="soft_labels"):
        FederatedStrategy(client_sides={"x": Needy()}, server_sides={"y": Giver(), "z": Giver()})


# ---- roll call -----------------------------------------------------------------------------------


def answer(*node_infos: RecordDict | str) -> InProcessGrid:
    """Return a grid whose nodes 100, 101, ... answer with these records, or raise these errors."""

    def handle(content):
        def answer_one(message: Message) -> Message:
            if isinstance(content, str):
                raise ValueError(content)
            return Message(content, reply_to=message)

        return answer_one

    return InProcessGrid({100 + i: handle(content) for i, content in enumerate(node_infos)})


def test_roll_call_maps_clients_to_nodes():
    registry = register_clients(
        answer(node_info(1, 2, 30), node_info(0, 2, 20)),
        FederationConfig(2, connect_timeout_seconds=1.0, fingerprint={}),
    )
    assert registry.nodes == {0: 101, 1: 100}
    assert registry.num_examples == {0: 20, 1: 30}


def test_two_nodes_with_one_partition_id_are_refused():
    with pytest.raises(ConfigError, match="nodes 100 and 101 both say partition-id=1"):
        register_clients(
            answer(node_info(1, 2, 3), node_info(1, 2, 3)),
            FederationConfig(2, connect_timeout_seconds=1.0, fingerprint={}),
        )


@pytest.mark.parametrize("what", ["code", "recipe"])
def test_a_node_with_other_code_or_recipe_is_refused(what):
    mine = {"code": "aa", "recipe": "bb"}
    node_infos = [node_info(0, 2, 3, **mine), node_info(1, 2, 3, **{**mine, what: "cc"})]
    with pytest.raises(ConfigError, match=rf"node 101 \(partition 1\) runs another {what}: 'cc'"):
        register_clients(
            answer(*node_infos), FederationConfig(2, connect_timeout_seconds=1.0, fingerprint=mine)
        )


def test_too_few_nodes_time_out():
    with pytest.raises(TimeoutError, match="clients=3, but only 1 SuperNodes"):
        register_clients(
            answer(node_info(0, 3, 3)),
            FederationConfig(3, connect_timeout_seconds=0.3, fingerprint={}),
        )


def test_too_many_nodes_are_refused():
    with pytest.raises(ConfigError, match=r"clients=2 needs the partition ids 0\.\.1"):
        register_clients(
            answer(node_info(0, 2, 3), node_info(1, 2, 3), node_info(2, 2, 3)), 2, {}, 1.0
        )


def test_a_node_that_cannot_take_part_says_why():
    with pytest.raises(ConfigError, match="node 101 cannot take part: no such folder"):
        register_clients(
            answer(node_info(0, 2, 3), "no such folder"),
            FederationConfig(2, connect_timeout_seconds=1.0, fingerprint={}),
        )


def test_config_of_a_message():
    """The client hears its round, rate, experiment and which of its states counts."""
    grid_messages: list[ConfigRecord] = []
    strategy = SCAFFOLD(local_lr=0.5)

    def tamper(reply: Message) -> Message:
        return reply

    run(strategy, rounds=2, tamper=tamper)
    message = next(
        iter(
            strategy.configure_train(
                3, to_record({"head.weight": torch.zeros(1, 2)}), ConfigRecord({"extra": 1}), None
            )
        )
    )
    grid_messages.append(message.content.config_records["config"])
    config = dict(grid_messages[0])
    assert config["round"] == 3
    assert config["state-round"] == 2
    assert config["lr"] == 0.5
    assert config["extra"] == 1
    assert config["experiment"] == strategy.state.experiment


def test_a_payload_of_its_own_for_every_client():
    """Payloads made anew for each client must not be mistaken for one another."""

    class Personal(ServerSide):
        sends = frozenset({"greeting"})

        def broadcast(self, client_id):
            return {"greeting": {"id": torch.tensor([float(client_id)])}}

    seen: dict[int, float] = {}

    class Listener(ClientSide):
        needs = frozenset({"greeting"})

        def begin(self, context):
            seen[id(context.data)] = context.received["greeting"]["id"].item()

    datasets = clients(4)
    federate(
        FederatedStrategy(client_sides={"x": Listener()}, server_sides={"x": Personal()}),
        datasets,
        model=lambda: Regression(2),
        rounds=1,
        options=OPTIONS,
    )
    assert [seen[id(data)] for data in datasets] == [0.0, 1.0, 2.0, 3.0]


def test_evaluation_at_the_clients_is_the_mean_over_their_examples():
    """In an exchange of its own, on each client's data; weighted by example counts."""
    datasets = clients(2)
    datasets[1] = TensorBatches(datasets[1].inputs[:4], datasets[1].labels[:4])
    params, reports = federate(
        FedAvg(evaluate_on_clients=True, local_lr=0.1),
        datasets,
        model=lambda: Regression(2),
        rounds=1,
        options=OPTIONS,
    )
    losses = [
        0.5 * (d.inputs @ params["head.weight"][0] - d.labels).square().mean() for d in datasets
    ]
    expected = (8 * losses[0] + 4 * losses[1]) / 12
    assert reports[1].client_evaluation["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_target_ends_the_run(tmp_path):
    from tests.recipes import TINY, run_recipe

    summary = run_recipe(tmp_path / "run", *TINY, "rounds=20", "target_accuracy=0.3")
    assert summary["accuracy"] >= 0.3
    assert summary["rounds"] < 20
