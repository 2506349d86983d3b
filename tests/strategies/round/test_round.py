"""The round: refused and lost replies, client state, resume, payloads, messages."""

from __future__ import annotations

import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from client_app.state import ContextStateStore, FolderStateStore
from common.errors import ConfigError
from strategies.base import ClientSide, ServerSide
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.components.samplers import FixedSizeSampler
from strategies.components.server_optimizers import SGD
from strategies.fedavg import FedAvg
from strategies.round.federated import FederatedStrategy
from strategies.round.records import count_bytes, to_record, to_tensors
from strategies.round.registration import FederationConfig
from strategies.scaffold import SCAFFOLD
from tests.federation import Regression, TensorBatches, federate, lost

OPTIONS = LocalTrainingConfig(batch_size=4, epochs=1)
TYPES = [torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int64]
TYPES += [torch.bool, torch.complex64]


def clients(count: int = 3) -> list[TensorBatches]:
    generator = torch.Generator().manual_seed(5)
    return [
        TensorBatches(
            torch.randn(8, 2, generator=generator, dtype=torch.float64),
            torch.randn(8, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def uneven() -> list[TensorBatches]:
    """Return two clients, of 8 and of 4 examples."""
    first, second = clients(2)
    return [first, TensorBatches(second.inputs[:4], second.labels[:4])]


def run(strategy, data=None, *, rounds=3, count=3, model=lambda: Regression(2), **how):
    data = data or clients(count)
    return federate(strategy, data, model=model, rounds=rounds, options=OPTIONS, **how)


def from_client(message: Message, client: int) -> bool:
    content = message.content if message.has_content() else RecordDict()
    metrics = content.metric_records.get("metrics", MetricRecord())
    return metrics.get("partition-id") == client


# ---- refused replies -----------------------------------------------------------------------------


def edit(record: str, change, reply: Message) -> Message:
    """Edit one record of client 1's train reply; None deletes it."""
    if from_client(reply, 1) and (new := change(reply.content.pop(record))) is not None:
        reply.content[record] = new
    return reply


def with_value(value: float):
    def change(record: ArrayRecord) -> ArrayRecord:
        tensors = to_tensors(record)
        tensors["head.weight"][0, 1] = value
        return to_record(tensors)

    return change


def pickled(record: ArrayRecord) -> ArrayRecord:
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


def without(*clients: int):
    """Return a tamper that drops the train replies of clients."""
    return lambda reply: None if any(from_client(reply, one) for one in clients) else reply


@pytest.mark.parametrize(("record", "change", "reason"), BAD_REPLIES)
def test_a_bad_reply_is_refused_with_a_reason_and_the_round_goes_on(record, change, reason):
    """The others are aggregated as if client 1 had not been sampled."""
    params, reports = run(SCAFFOLD(), rounds=1, tamper=partial(edit, record, change))
    assert list(reports[1].clients) == [0, 2]
    (failure,) = reports[1].failures
    assert failure.startswith("client 1: ")
    assert reason in failure
    expected, _ = run(SCAFFOLD(), rounds=1, tamper=without(1))
    assert torch.equal(params["head.weight"], expected["head.weight"])


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (without(2), "no reply within 3600 s (runtime.round_timeout_seconds)"),
        (lambda r: lost(r) if from_client(r, 2) else r, "error 5: Node Unavailable"),
    ],
)
def test_a_lost_reply_is_the_clients_failure(tamper, why):
    _, reports = run(FedAvg(), rounds=1, tamper=tamper)
    assert reports[1].failures == [f"client 2: {why}"]


def test_too_few_replies_leave_the_model_as_it_was_and_end_the_run_if_repeated():
    strategy = FedAvg(federation=FederationConfig(min_replies=2, max_failed_rounds=2))
    params, reports = run(strategy, rounds=1, tamper=without(1, 2))
    assert torch.equal(params["head.weight"], torch.zeros(1, 2, dtype=torch.float64))
    assert len(reports[1].failures) == 2
    federation = FederationConfig(max_failed_rounds=2)
    with pytest.raises(RuntimeError, match=r"2 rounds in a row.*min_replies=1.*client 0: no reply"):
        run(FedAvg(federation=federation), tamper=without(0, 1, 2))


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
        return without(1)(reply) if strategy.state.round == 1 else reply

    found, _ = run(strategy, rounds=4, stores=stores("lost"), tamper=tamper)
    absent, _ = run(SCAFFOLD(local_lr=0.1, sampler=Absent()), rounds=4, stores=stores("absent"))
    assert torch.equal(found["head.weight"], absent["head.weight"])


@pytest.mark.parametrize("every", [1, 2])
def test_resume_equals_the_uninterrupted_run(every, tmp_path):
    """SCAFFOLD, half the clients a round, killed in round 5; the last checkpoint is older."""

    def stores(name: str):
        return {i: FolderStateStore(tmp_path / name, i) for i in range(4)}

    half, saved = FixedSizeSampler(0.5, seed=3), {}
    first, second, third = (SCAFFOLD(local_lr=0.1, sampler=half) for _ in range(3))
    whole, _ = run(third, rounds=8, count=4, stores=stores("whole"))

    def until_five(report, arrays):
        if report.round and report.round % every == 0:
            saved["params"], saved["state"] = to_tensors(arrays), first.snapshot()
            first.state.mark_durable()
        return report.round == 5

    run(first, rounds=8, count=4, stores=stores("cut"), on_round=until_five)
    last = 5 if every == 1 else 4
    second.restore(saved["state"])
    assert second.state.round == last
    resumed, reports = run(second, rounds=8, count=4, stores=stores("cut"), initial=saved["params"])
    assert [report.round for report in reports] == list(range(last + 1, 9))
    assert torch.equal(whole["head.weight"], resumed["head.weight"])


def test_folder_store_keeps_what_may_be_asked_for(tmp_path):
    store = FolderStateStore(tmp_path, 7)
    for round in (1, 4, 6, 9):
        store.save("run", round, {"c": {"w": torch.tensor([float(round)])}}, keep={4})
    found = {path.stem for path in (tmp_path / "run" / "client-00007").iterdir()}
    assert found == {"round-000004", "round-000009"}
    assert store.load("run", 4)["c"]["w"].item() == 4.0
    assert store.load("run", 6) == {}
    assert store.load("other", 4) == {}
    for experiment in ("../up", "a/b", "", ".hidden"):  # it comes from the network
        with pytest.raises(ValueError, match="no folder name"):
            store.load(experiment, 1)


# ---- what travels --------------------------------------------------------------------------------


def test_bytes_are_those_of_the_arrays_as_serialised():
    """A (1, 2) float64 array is 16 bytes and a 128-byte header; SCAFFOLD sends two each way."""
    _, fedavg = run(FedAvg(), rounds=1)
    _, scaffold = run(SCAFFOLD(), rounds=1)
    assert (fedavg[1].bytes_down, fedavg[1].bytes_up) == (3 * 144, 3 * 144)
    assert (scaffold[1].bytes_down, scaffold[1].bytes_up) == (6 * 144, 6 * 144)


class Normed(Regression):
    """A head on normalised inputs."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)

    def forward(self, inputs):
        return super().forward(self.norm(inputs))


def test_batchnorm_statistics_are_averaged_by_examples_and_counters_stay():
    """Buffers skip the server optimiser: eta_g = 2 moves the weights twice as far, not them."""
    datasets = uneven()
    buffers = ["norm.running_mean", "norm.running_var"]
    strategy = FedAvg(buffers=buffers, server_optimizer=SGD(lr=2.0), local_lr=0.1)
    options = LocalTrainingConfig(batch_size=8, epochs=1)
    params, _ = federate(strategy, datasets, model=Normed, rounds=1, options=options)
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


@pytest.mark.parametrize(
    ("client", "server", "message"),
    [
        ([Needy], [], r"client_sides\.0 needs the payloads \['soft_labels'\]"),
        ([], [Giver], r"server_sides\.0 needs the payloads \['sums'\]"),
        ([Needy], [Giver, Giver], r"\['soft_labels'\] are sent by two of the server sides"),
        ([Corrector, Corrector], [], r"\['0', '1'\] all correct .*allow_stacked_corrections"),
    ],
)
def test_sides_that_do_not_fit_are_refused(client, server, message):
    sides = {
        "client_sides": {str(number): side() for number, side in enumerate(client)},
        "server_sides": {str(number): side() for number, side in enumerate(server)},
    }
    with pytest.raises(ConfigError, match=message):
        FederatedStrategy(**sides)
    if Corrector in client:
        FederatedStrategy(**sides, allow_stacked_corrections=True)


# ---- messages ------------------------------------------------------------------------------------


def test_a_message_tells_round_rate_state_version_and_outlives_the_round_by_an_hour():
    strategy = SCAFFOLD(local_lr=0.5, schedule=lambda round, num_rounds: round / num_rounds)
    run(strategy, rounds=2)
    arrays = to_record({"head.weight": torch.zeros(1, 2)})
    config = ConfigRecord({"extra": 1, "num-rounds": 4, "timeout-seconds": 77.0})
    (message, *_) = strategy.configure_train(3, arrays, config, None)
    versions = {"experiment": strategy.state.experiment, "state-dropped": ""}
    versions |= {"state-round": 2, "state-keep": 0}
    expected = {**config, "round": 3, "lr": 0.5 * 3 / 4, **versions}
    assert dict(message.content["config"]) == expected
    assert message.metadata.ttl == 77.0 + 3600.0  # sites' clocks may be ahead
    assert message.metadata.group_id == "3"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_tensor_travels_with_its_type_shape_and_bits(dtype):
    for shape in ((), (0,), (3,), (2, 3, 4)):
        tensor = (torch.arange(24)[: torch.Size(shape).numel()].reshape(shape) - 3).to(dtype)
        content = RecordDict({"payload": to_record({"a": tensor})})
        back = to_tensors(content["payload"])["a"]
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert torch.equal(back, tensor)
        assert count_bytes(content) == 128 + tensor.numel() * tensor.element_size()


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
    parts = {"client_sides": {"x": Listener()}, "server_sides": {"x": Personal()}}
    run(FederatedStrategy(**parts), datasets, rounds=1)
    assert [seen[id(data)] for data in datasets] == [0.0, 1.0, 2.0, 3.0]


def test_evaluation_at_the_clients_is_the_mean_over_their_examples():
    """In an exchange of its own, on each client's data; weighted by example counts."""
    datasets = uneven()
    params, reports = run(FedAvg(evaluate_on_clients=True, local_lr=0.1), datasets, rounds=1)
    losses = [
        0.5 * (d.inputs @ params["head.weight"][0] - d.labels).square().mean() for d in datasets
    ]
    expected = (8 * losses[0] + 4 * losses[1]) / 12
    assert reports[1].client_evaluation["loss"] == pytest.approx(float(expected), rel=1e-6)
