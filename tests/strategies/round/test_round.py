"""The round: refused and lost replies, client state, resume, payloads, messages."""

import math
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from torch import nn

from fedhet.client_app.state import ContextStateStore, FolderStateStore
from fedhet.common.errors import DivergedError
from fedhet.server_app.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedhet.strategies.base import ClientSide, ServerSide
from fedhet.strategies.components.aggregators import WeightedMean
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.components.server_optimizers import SGD
from fedhet.strategies.fedala import FedALA
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fedcm import FedCM
from fedhet.strategies.feddyn import FedDyn
from fedhet.strategies.fedexp import FedExP
from fedhet.strategies.fednova import FedNova
from fedhet.strategies.fedpvr import FedPVR
from fedhet.strategies.modes.robust.coordinates import Median
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.round.registration import FederationConfig
from fedhet.strategies.scaffold import SCAFFOLD
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.records import to_record, to_tensors
from tests.federation import Regression, TensorBatches, federate, lost
from tests.refused import refused
from tests.strategies import test_closed_forms as closed_forms
from tests.strategies.sides import built, client_side

OPTIONS = LocalTrainingConfig(batch_size=4, epochs=1)
ASKED = ClientMetrics(asked=True)


def clients(count: int = 3) -> list[TensorBatches]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(count, 8, 3, generator=generator, dtype=torch.float64)
    return [TensorBatches(rows[:, :2], rows[:, 2]) for rows in drawn]


def uneven() -> list[TensorBatches]:
    first, second = clients(2)
    return [first, TensorBatches(second.inputs[:4], second.labels[:4])]


def run(strategy, data=None, *, rounds=3, count=3, model=lambda: Regression(2), **how):
    data = data or clients(count)
    return federate(strategy, data, model=model, rounds=rounds, options=OPTIONS, **how)


def from_client(message: Message, client: int) -> bool:
    if not message.has_content() or "metrics" not in message.content:
        return False
    return message.content["metrics"]["partition-id"] == client


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


def without(*clients: int):
    return lambda reply: None if any(from_client(reply, one) for one in clients) else reply


TAMPERED = [  # test_border.py has all that is wrong with a reply
    (partial(edit, "update", with_value(math.nan)), "'head.weight' holds NaN or Inf"),
    (partial(edit, "update", with_value(math.inf)), "'head.weight' holds NaN or Inf"),
    (partial(edit, "metrics", lambda r: MetricRecord({**r, "num-steps": 0})), "no step"),
    (partial(edit, "control_variate_delta", lambda r: None), "lacks the payload"),
    (without(1), "no reply within 3600 s (runtime.round_timeout_seconds)"),
    (lambda r: lost(r) if from_client(r, 1) else r, "error 5: Node Unavailable"),
]


@pytest.mark.parametrize(("tamper", "reason"), TAMPERED)
def test_a_bad_or_lost_reply_has_a_reason_and_the_round_goes_on(tamper, reason):
    params, reports = run(SCAFFOLD(), rounds=1, tamper=tamper)
    assert list(reports[1].clients) == [0, 2]
    [failure] = reports[1].failures
    assert failure.startswith("client 1: ")
    assert reason in failure
    expected, _ = run(SCAFFOLD(), rounds=1, tamper=without(1))
    assert torch.equal(params["head.weight"], expected["head.weight"])


def test_too_few_replies_leave_the_model_as_it_was_and_end_the_run_if_repeated():
    strategy = built(FedAvg, federation=FederationConfig(min_replies=2, max_failed_rounds=2))
    params, reports = run(strategy, rounds=1, tamper=without(1, 2))
    assert torch.equal(params["head.weight"], torch.zeros(1, 2, dtype=torch.float64))
    assert len(reports[1].failures) == 2
    federation = FederationConfig(max_failed_rounds=2)
    with refused("2 rounds", "min_replies=1", kind=RuntimeError):
        run(built(FedAvg, federation=federation), tamper=without(0, 1, 2))
    strategy, lose = built(FedAvg, federation=federation), without(0, 1, 2)
    _, reports = run(  # one in a row, twice
        strategy, rounds=3, tamper=lambda reply: reply if strategy.state.round == 1 else lose(reply)
    )
    assert [len(report.clients) for report in reports[1:]] == [0, 3, 0]


def test_the_round_that_ends_a_run_is_reported_and_a_resumed_run_has_all_its_chances():
    federation, seen = FederationConfig(max_failed_rounds=2), []

    def report_of(report, arrays):
        seen.append((report.round, len(report.failures), report.fatal is None))

    first = built(FedAvg, federation=federation)
    with refused("2 rounds", kind=RuntimeError):
        run(first, rounds=9, tamper=without(0, 1, 2), on_round=report_of)
    assert seen == [(0, 0, True), (1, 3, True), (2, 3, False)]
    second = built(FedAvg, federation=federation)
    second.restore(first.snapshot())
    with refused("2 rounds", kind=RuntimeError):
        run(second, rounds=9, tamper=without(0, 1, 2), on_round=report_of)
    assert seen[3:] == [(3, 3, True), (4, 3, False)]


def test_a_strategy_goes_on_after_its_last_round_and_does_not_run_one_again():
    strategy, seen = FedAvg(), []
    run(strategy, rounds=2)
    with refused("num_rounds=2"):
        run(strategy, rounds=2)
    run(strategy, rounds=3, on_round=lambda report, arrays: seen.append(report.round))
    assert seen == [3]


@pytest.mark.parametrize(("lost", "error"), [((1,), RuntimeError), ((1, 2), DivergedError)])
def test_a_run_has_diverged_if_most_of_its_clients_have(lost, error):
    """One of three that sends NaN is that client's fault, and the round is short of replies."""

    def tamper(reply: Message) -> Message:
        if any(from_client(reply, client) for client in lost):
            reply.content["update"] = with_value(math.nan)(reply.content["update"])
        return reply

    federation = FederationConfig(min_replies=3, max_failed_rounds=1)
    with refused("NaN or Inf", kind=error):
        run(built(FedAvg, federation=federation), rounds=1, tamper=tamper)


def test_the_state_has_the_output_where_it_is_not_the_model():
    """A round that fails after a resume evaluates it again."""
    strategy = built(FedDyn)
    params, _ = run(strategy)
    resumed = built(FedDyn)
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    resumed.server_step.init(zeros, strategy.server_step.state_dict())
    assert torch.equal(resumed.server_step.output_model["head.weight"], params["head.weight"])


def test_a_client_keeps_the_states_of_the_last_two_checkpoints():
    """They are of rounds 2 and 4: a resumed run may begin after either."""
    versions = ClientVersions()
    for round in range(1, 6):
        versions.commit({0: round})
        if round % 2 == 0:
            versions.mark_durable()
    told = versions.config_of(0)
    assert (told["state-round"], told["state-keep"]) == (5, "2,4")


def folders(path, count: int, store=FolderStateStore) -> dict:
    return {i: store(path, i) for i in range(count)}


@pytest.mark.slow
@pytest.mark.parametrize("store", [lambda *_: ContextStateStore(RecordDict()), FolderStateStore])
def test_a_lost_reply_does_not_move_the_client_state(store, tmp_path):
    strategy = built(SCAFFOLD, local_lr=0.1)

    def tamper(reply: Message) -> Message | None:
        return without(1)(reply) if strategy.state.round == 1 else reply

    found, _ = run(strategy, rounds=4, stores=folders(tmp_path / "lost", 3, store), tamper=tamper)
    absent = built(SCAFFOLD, local_lr=0.1, sampler=closed_forms.Listed([0, 1, 2], [0, 2]))
    expected, _ = run(absent, rounds=4, stores=folders(tmp_path / "absent", 3))
    assert torch.equal(found["head.weight"], expected["head.weight"])


@pytest.mark.slow
def test_resume_from_an_older_checkpoint_equals_the_uninterrupted_run(tmp_path):
    half, saved = FixedSizeSampler(participation=0.5, seed=3), {}
    first, second, third = (built(SCAFFOLD, local_lr=0.1, sampler=half) for _ in range(3))
    whole, _ = run(third, rounds=8, count=4, stores=folders(tmp_path / "whole", 4))

    def until_five(report, arrays):
        if report.round in (2, 4):
            saved["params"], saved["state"] = to_tensors(arrays), first.snapshot()
            first.state.mark_durable()
        return report.round == 5

    cut = folders(tmp_path / "cut", 4)
    run(first, rounds=8, count=4, stores=cut, on_round=until_five)
    second.restore(saved["state"])
    assert second.state.round == 4
    resumed, reports = run(second, rounds=8, count=4, stores=cut, initial=saved["params"])
    assert [report.round for report in reports] == [5, 6, 7, 8]
    assert torch.equal(whole["head.weight"], resumed["head.weight"])


def test_states_that_a_resumed_run_cannot_have_are_no_fault_of_the_clients():
    """They were in the Context of the Flower run before; a later loss is one."""
    first, second = built(SCAFFOLD, local_lr=0.1), built(SCAFFOLD, local_lr=0.1)
    run(first, rounds=2)
    second.restore(first.snapshot())

    def losing(message: Message) -> Message:
        if from_client(message, 1) and second.state.round == 3:
            message.content["metrics"]["state-lost"] = 1.0
        return message

    seen = []
    _, reports = run(
        second,
        rounds=4,
        tamper=losing,
        on_round=lambda report, arrays: seen.append(set(second.state.restarted_by)),
    )
    assert [report.metrics.get("state-lost") for report in reports] == [1.0, 1.0]
    assert seen == [set(), {1}]


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
        with refused("folder name", kind=ValueError):
            store.load(experiment, 1)


BUFFERS = ["norm.running_mean", "norm.running_var"]


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)

    def forward(self, inputs):
        return super().forward(self.norm(inputs))


def test_batchnorm_statistics_are_averaged_by_examples_and_counters_stay():
    """Buffers skip the server optimiser: eta_g = 2 moves the weights twice as far, not them."""
    datasets, options = uneven(), LocalTrainingConfig(batch_size=8, epochs=1)
    strategy = built(FedAvg, buffers=BUFFERS, server_optimizer=SGD(lr=2.0), local_lr=0.1)
    params, _ = federate(strategy, datasets, model=Normed, rounds=1, options=options)
    assert "norm.num_batches_tracked" not in params
    mean = torch.cat([data.inputs for data in datasets]).mean(0)
    torch.testing.assert_close(params["norm.running_mean"], 0.1 * mean)


class Needy(ClientSide):
    needs, sends = frozenset({"soft_labels"}), frozenset({"sums"})


class Giver(ServerSide):
    needs, sends = frozenset({"sums"}), frozenset({"soft_labels"})


class Corrector(ClientSide):
    def correct(self, grads, context) -> None:
        """Edit nothing, but say that it would."""


class Owner(ClientSide):
    def own_model(self, context) -> dict[str, torch.Tensor]:
        """Return nothing, but say that it would."""
        return {}


@pytest.mark.parametrize(
    ("clients", "servers", "named"),
    [
        ([Owner, Owner], [], ["0", "1"]),
        ([Needy], [], ["client_sides.0", "soft_labels"]),
        ([], [Giver], ["server_sides.0", "sums"]),
        ([Needy], [Giver, Giver], ["0", "1", "soft_labels"]),
        ([Corrector, Corrector], [], ["0", "1", "allow_stacked_corrections"]),
    ],
)
def test_sides_that_do_not_fit_are_refused(clients, servers, named):
    parts = ("client_sides", clients), ("server_sides", servers)
    sides = {part: {str(n): side() for n, side in enumerate(some)} for part, some in parts}
    with refused(*named):
        built(**sides)
    if Corrector in clients:
        built(**sides, allow_stacked_corrections=True)


def test_a_message_tells_round_rate_state_version_and_outlives_the_round_by_an_hour():
    strategy = built(SCAFFOLD, local_lr=0.5, schedule=lambda round, num_rounds: round / num_rounds)
    run(strategy, rounds=2)
    arrays = to_record({"head.weight": torch.zeros(1, 2)})
    config = ConfigRecord({"extra": 1, "num-rounds": 4, "timeout-seconds": 77.0})
    (message, *_) = strategy.configure_train(3, arrays, config, None)
    versions = {"experiment": strategy.state.experiment, "state-dropped": ""}
    versions |= {"state-round": 2, "state-keep": "0,0"}
    expected = {**config, "round": 3, "lr": 0.5 * 3 / 4, **versions}
    assert dict(message.content["config"]) == expected
    assert message.metadata.ttl == 77.0 + 3600.0  # sites' clocks may be ahead
    assert message.metadata.group_id == "3"


class Drawing(FixedSizeSampler):
    def __init__(self, drawn: list) -> None:
        super().__init__()
        self.drawn = drawn

    def sample(self, round: int, size: int) -> list:
        return self.drawn


@pytest.mark.parametrize("drawn", [[0, 0], [-1], [0, 7], [0.5], ["0"]])
def test_what_a_sampler_draws_is_checked(drawn):
    with refused("Drawing", "0 to 2"):
        run(built(FedAvg, sampler=Drawing(drawn)), rounds=1)


class Wrong(WeightedMean):
    """An aggregator that gives what a function makes of the right Delta."""

    def __init__(self, change, weighting="examples") -> None:
        self.change, self.weighting = change, weighting

    def __call__(self, params, total):
        return self.change(super().__call__(params, total))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda delta: {}, "head.weight"),
        (lambda delta: None, "NoneType"),
        (lambda delta: {**delta, "x": torch.zeros(1)}, "'x'"),
        (
            lambda delta: {name: value.numpy() for name, value in delta.items()},
            "ndarray",
        ),
        (
            lambda delta: {name: value.sum() for name, value in delta.items()},
            "()",
        ),
    ],
)
def test_what_an_aggregator_gives_is_checked(change, named):
    with refused("Wrong", named):
        run(built(aggregator=Wrong(change)), rounds=1)


def test_a_slot_may_compute_in_float64_and_the_model_keeps_its_type():
    wide = Wrong(lambda delta: {name: value.double() for name, value in delta.items()})
    single = [TensorBatches(one.inputs.float(), one.labels.float()) for one in clients()]
    found = []
    for aggregator in (WeightedMean(), wide):
        strategy = built(aggregator=aggregator)
        params, reports = run(strategy, single, model=lambda: Regression(2).float())
        assert {value.dtype for value in params.values()} == {torch.float32}
        assert [report.bytes_down for report in reports[1:]] == [reports[1].bytes_down] * 3
        found.append(params)
    torch.testing.assert_close(*found)


class Reordering:
    """As alignment does, without its library."""

    reorders = True


REORDERED = {"reordering": Reordering()}
MOVED = {"fedala": client_side(FedALA)}


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: built(FedDyn, transforms=REORDERED), ["Reordering", "FedDynServer"]),
        (lambda: built(FedPVR, transforms=REORDERED), ["Reordering", "control_variate_delta"]),
        (lambda: built(FedNova, client_sides=MOVED), ["NormalizedMean", "fedala"]),
        (lambda: built(FedCM, client_sides=MOVED), ["ClientMomentumServer", "fedala"]),
    ],
)
def test_an_aggregation_that_does_not_mean_what_clients_mean_is_refused(build, named):
    with refused(*named):
        build()


def test_a_payload_of_its_own_for_every_client():
    class Personal(ServerSide):
        sends = frozenset({"greeting"})

        def broadcast(self, client_id):
            return {"greeting": {"id": torch.tensor(client_id)}}

    class Listener(ClientSide):
        needs = frozenset({"greeting"})

        def begin(self, context):
            seen[id(context.data)] = context.received["greeting"]["id"].item()

    datasets, seen = clients(4), {}
    sides = {"client_sides": {"x": Listener()}, "server_sides": {"x": Personal()}}
    run(built(**sides), datasets, rounds=1)
    assert [seen[id(data)] for data in datasets] == [0, 1, 2, 3]


def test_evaluation_at_the_clients_is_the_mean_over_their_examples():
    datasets = uneven()
    params, reports = run(built(FedAvg, client_metrics=ASKED, local_lr=0.1), datasets, rounds=1)
    errors = [d.inputs @ params["head.weight"][0] - d.labels for d in datasets]
    expected = 0.5 * float(torch.cat(errors).square().mean())
    assert reports[1].client_evaluation["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_lost_answer_to_an_evaluation_is_a_failure_of_the_round():
    def lose(reply: Message) -> Message | None:
        of_client_1 = reply.metadata.src_node_id == 1001
        return None if of_client_1 and reply.metadata.message_type == "evaluate" else reply

    strategy = built(FedAvg, client_metrics=ASKED, local_lr=0.1)
    _, reports = run(strategy, uneven(), rounds=2, tamper=lose)
    assert [list(report.clients) for report in reports[1:]] == [[0, 1], [0, 1]]
    for report in reports[1:]:
        (failure,) = report.failures
        assert failure.startswith("client 1, evaluation: no reply within ")


def test_clients_without_held_out_examples_do_not_mix_their_training_ones_in():
    """Client 1 alone says that it holds some out."""

    def hold_out(reply: Message) -> Message:
        if (info := reply.content.config_records.get("client")) and info["partition-id"] == 1:
            info["num-held-out"] = 7
        return reply

    datasets, strategy = (
        uneven(),
        built(FedAvg, client_metrics=ASKED, local_lr=0.1),
    )
    params, reports = run(strategy, datasets, rounds=1, tamper=hold_out)
    errors = datasets[1].inputs @ params["head.weight"][0] - datasets[1].labels
    expected = 0.5 * float(errors.square().mean())
    assert reports[1].client_evaluation["loss"] == pytest.approx(expected, rel=1e-6)


# A client that loses its state: what is coupled to it restarts, and the run goes on.
AFTER = 3  # the round after which the state is gone
RESTARTED = dict.fromkeys(("control_variate", "residual.control_variate_delta"), AFTER + 1)


class Forgetful(ContextStateStore):
    def __init__(self) -> None:
        super().__init__(RecordDict())
        self.whole = True

    def load(self, experiment, round):
        if round == AFTER and self.whole:
            self.whole = False
            return {}
        return super().load(experiment, round)


def stores(*losing: int):
    return {i: Forgetful() if i in losing else ContextStateStore(RecordDict()) for i in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "given", "losing"),
    [(SCAFFOLD, {}, [0]), (SCAFFOLD, {}, [0, 1]), (FedPVR, {"layers": "all"}, [1])],
)
def test_control_variates_still_lead_to_the_optimum(method, given, losing, tmp_path):
    """A lost c_i that stayed in c would keep the model .65 to .92 from it."""
    strategy = built(method, local_lr=0.05, **given)
    assert closed_forms.distance(strategy, 40, stores=stores(*losing)) < 1e-9
    assert strategy.state.restarted == RESTARTED
    checkpoint = Checkpoint({"w": torch.zeros(2)}, strategy.snapshot(), "recipe")
    loaded = load_checkpoint(save_checkpoint(tmp_path, checkpoint), ["w"])
    assert loaded.state.restarted == RESTARTED


@pytest.mark.slow
def test_partial_participation_restarts_every_client_once_and_drift_sums_restart():
    strategy = built(SCAFFOLD, local_lr=0.04, sampler=FixedSizeSampler(participation=0.5, seed=1))
    assert closed_forms.distance(strategy, 80, stores=stores(0, 1)) < 1e-9
    assert strategy.state.restarted
    assert (
        closed_forms.distance(built(FedDyn, alpha=1.0, local_lr=0.05), 60, stores=stores(0)) < 1e-5
    )


@pytest.mark.slow
def test_a_secure_sum_reports_a_lost_state():
    strategy = built(SCAFFOLD, local_lr=0.05, secure_aggregation=SecAggPlus(max_examples=50))
    clients = [*closed_forms.clients(), *closed_forms.clients()]  # three remain: fewer are no sum
    fresh = {client: ContextStateStore(RecordDict()) for client in (2, 3)}
    how = {"stores": {**stores(1), **fresh}, "options": closed_forms.STEPS}
    federate(strategy, clients, model=partial(Regression, 2), rounds=5, **how)
    assert strategy.state.restarted == RESTARTED


@pytest.mark.parametrize(
    ("method", "slot"),
    [
        (FedExP, "aggregator"),
        (FedNova, "aggregator"),
        (FedDyn, "server_optimizer"),
        (FedDyn, "aggregator"),
    ],
)
def test_a_slot_that_makes_the_method_is_not_taken_and_then_dropped(method, slot):
    given = {"server_optimizer": SGD(lr=0.5), "aggregator": Median()}[slot]
    with refused(method.name, slot):
        built(method, **{slot: given})


def test_flowers_should_stop_ends_a_run_after_a_finished_round():
    """The callback of Flower 1.43: the rounds from 1 on, and the result so far."""
    strategy, seen = built(FedAvg), []

    def should_stop(round: int, result: Result) -> bool:
        seen.append((round, sorted(result.train_metrics_clientapp)))
        return round == 2

    _, reports = run(strategy, rounds=5, should_stop=should_stop)
    assert [report.round for report in reports] == [0, 1, 2]
    assert seen == [(1, [1]), (2, [1, 2])]
