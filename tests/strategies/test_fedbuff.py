"""FedBuff and FedAsync against the synchronous method, an event loop written out, and by hand."""

import heapq
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import MessageType

from fedhet.server_app.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedhet.strategies.base import Reply
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.components.schedules import ExponentialDecay
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fedbuff import FedAsync, FedBuff
from fedhet.strategies.fedcm import FedCM
from fedhet.strategies.feddyn import FedDyn
from fedhet.strategies.fedexp import FedExP
from fedhet.strategies.fedmrur import FedMRUR
from fedhet.strategies.fednova import FedNova
from fedhet.strategies.modes.asynchronous import Asynchronous, Started
from fedhet.strategies.modes.private.local_privacy import Local
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.simulated_clients import SimulatedClients, SimulatedStep
from fedhet.strategies.modes.systems import Constant, DayNight, LogNormal
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.round.reply_fold import Weights, sum_of
from fedhet.strategies.scaffold import SCAFFOLD
from fedhet.strategies.wire.records import METRICS, to_tensors
from tests.federation import Regression, TensorBatches, federate
from tests.refused import refused
from tests.strategies.round.test_round import BUFFERS, Normed, folders
from tests.strategies.sides import built

STEPS = LocalTrainingConfig(batch_size=100, epochs=None, steps=2)
LR = 0.1
SIZE = 6


def clients(size: int = SIZE) -> list[TensorBatches]:
    generator = torch.Generator().manual_seed(8)
    drawn = torch.randn(size, 12, 3, generator=generator, dtype=torch.float64)
    return [TensorBatches(rows[:, :2], rows[:, 2]) for rows in drawn]


def run(strategy, rounds: int, size: int = SIZE, **how):
    params, reports = federate(
        strategy, clients(size), model=lambda: Regression(2), rounds=rounds, options=STEPS, **how
    )
    return params["head.weight"], reports


def slots(system, **more):
    return {"system": system, "local_lr": LR, "local_training": STEPS, **more}


def trained(data: TensorBatches, weight: np.ndarray) -> np.ndarray:
    """Return the weights after two full-batch steps of gradient descent."""
    x, y = data.inputs.numpy(), data.labels.numpy()
    for _ in range(2):
        weight = weight - LR * x.T @ (x @ weight - y) / len(y)
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedCM])
def test_clients_of_one_speed_that_all_finish_a_step_are_a_round_to_the_bit(method):
    waits = built(method, local_lr=LR, local_training=STEPS, aggregator=UniformMean())
    expected, _ = run(waits, 5)
    together = Asynchronous(buffer=SIZE)
    found, reports = run(
        built(method, aggregator=UniformMean(), asynchronous=together, **slots(Constant())), 5
    )
    assert torch.equal(found, expected)
    assert all(set(report.staleness) == {0} for report in reports[1:])


def event_loop(steps: int, at_once: int, buffer: int, system: LogNormal, weigh, towards_model):
    """Return the model after each step of the textbook's event loop, one event at a time."""
    data, x = clients(), np.zeros(2)
    models, queue, versions, clock = [x], [], {}, 0.0
    for step in range(1, steps + 1):
        rng, arrived = np.random.default_rng([0x57, 0, step]), {}
        while len(arrived) < buffer:
            idle = [i for i in range(SIZE) if i not in versions and i not in arrived]
            count = min(at_once - len(versions), len(idle))
            for i in sorted(rng.choice(len(idle), size=count, replace=False).tolist()):
                versions[idle[i]] = step - 1
                seconds = system.slowness(idle[i]) * 24 * system.seconds_per_example
                heapq.heappush(queue, (clock + seconds, idle[i]))
            clock, client = heapq.heappop(queue)
            arrived[client] = versions.pop(client)
        change = np.zeros(2)
        for client, version in arrived.items():
            got = models[version]
            update = trained(data[client], got) - (models[-1] if towards_model else got)
            change += weigh(step - 1 - version) * update / buffer
        models.append(models[-1] + (0.6 if towards_model else 1.0) * change)
    return models[-1], clock


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbuff", "fedasync"])
def test_a_run_is_that_of_an_event_loop_written_out(method):
    system = LogNormal(sigma=1.5)
    how = slots(system, sampler=FixedSizeSampler(participation=0.67))
    if method == "fedbuff":
        found, reports = run(built(FedBuff, asynchronous={"buffer": 2}, **how), 12)
        expected, clock = event_loop(12, 4, 2, system, lambda tau: (1 + tau) ** -0.5, False)
    else:
        found, reports = run(
            built(FedAsync, asynchronous={"exponent": 2.0, "threshold": 1.0}, **how), 20
        )
        hinge = lambda tau: 1.0 if tau <= 1 else 1 / (2 * (tau - 1) + 1)  # noqa: E731
        expected, clock = event_loop(20, 4, 1, system, hinge, True)
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=0, atol=1e-12)
    assert reports[-1].simulated_seconds == pytest.approx(clock)
    assert max(max(report.staleness) for report in reports[1:]) > 2


@pytest.mark.slow
def test_discounts_by_hand_and_too_stale_replies_are_not_waited_for():
    assert [Asynchronous(exponent=0.5).weight(tau) for tau in (0, 3)] == [1.0, 0.5]
    hinge = Asynchronous(discount="hinge", exponent=10.0, threshold=4.0)
    assert [hinge.weight(tau) for tau in (4, 5)] == [1.0, 1 / 11]
    assert Asynchronous(discount="constant").weight(9) == 1.0
    fresh = Asynchronous(buffer=2, max_staleness=1)
    strategy = built(
        FedAvg, asynchronous=fresh, aggregator=UniformMean(), **slots(LogNormal(sigma=2.0))
    )
    _, reports = run(strategy, 15)
    assert max(max(report.staleness) for report in reports[1:]) <= 1
    assert any(report.late for report in reports[1:])


def test_late_replies_may_have_the_step_sizes_of_the_rounds_that_they_were_told():
    """Halved every step: a reply's lr-sum is checked against its own round's."""
    how = slots(LogNormal(sigma=1.5), schedule=ExponentialDecay(decay=0.5))
    _, reports = run(built(FedBuff, asynchronous={"buffer": 2}, **how), 8)
    assert max(max(report.staleness) for report in reports[1:]) > 1
    assert not any(report.failures for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [None, Asynchronous(buffer=2)])
def test_epsilon_counts_the_messages_to_a_client_and_no_sized_one(settings):
    """The system asks how long a message is, which is none to client 0."""
    asked = dict.fromkeys(range(SIZE), 0)

    def count(reply):
        if reply.metadata.message_type == MessageType.TRAIN:
            asked[reply.metadata.src_node_id - 1000] += 1
        return reply

    client, side = Local().halves(None)
    strategy = built(
        client_sides={"differential_privacy": client},
        server_sides={"differential_privacy": side},
        aggregator=UniformMean(),
        asynchronous=settings,
        sampler=FixedSizeSampler(participation=0.5),
        **slots(LogNormal(sigma=1.5)),
    )
    run(strategy, 5, tamper=count)
    assert dict(side.uploads) == {client: number for client, number in asked.items() if number}


def normed(scales: list[float]) -> list[TensorBatches]:
    generator = torch.Generator().manual_seed(1)
    kind = torch.float64
    drawn = [s * torch.randn(40, 2, generator=generator, dtype=kind) for s in scales]
    return [TensorBatches(rows, torch.zeros(40, dtype=kind)) for rows in drawn]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "buffer"), [(FedBuff, 3), (FedAsync, 1)])
def test_variances_of_sites_of_other_scales_stay_between_theirs(method, buffer):
    """Added up, changes from stale variances made -2.4 of them, and the next losses NaN."""
    options, seen = LocalTrainingConfig(batch_size=8, epochs=4), []
    strategy = built(
        method,
        asynchronous={"buffer": buffer},
        **slots(LogNormal(sigma=1.5), local_training=options, local_lr=0.01, buffers=BUFFERS),
    )

    def watch(report, arrays):
        seen.append(to_tensors(arrays)["norm.running_var"])
        return False

    data = normed([0.1, 0.1, 0.1, 1.0, 1.0, 3.0])
    how = {"model": Normed, "rounds": 15, "options": options, "on_round": watch}
    _, reports = federate(strategy, data, **how)
    assert max(max(report.staleness) for report in reports[1:]) > 1
    assert 0.0 < float(torch.stack(seen).min())
    assert float(torch.stack(seen).max()) < 3.0 * 9.0


@pytest.mark.parametrize("towards_model", [False, True])
def test_buffers_are_a_mean_of_the_clients_and_the_servers_by_hand(towards_model):
    """Client 0 of 3 examples got 4 and has .5 (s = 1/2); client 1 of 1 example got 2 and has 1."""
    replies = [
        Reply(0, 3, 1, 0.1, {"w": torch.tensor([1.0])}, buffers={"v": torch.tensor([-3.5])}),
        Reply(1, 1, 1, 0.1, {"w": torch.tensor([2.0])}, buffers={"v": torch.tensor([-1.0])}),
    ]
    discounts = {0: 0.5, 1: 1.0}
    total = sum_of(replies, Weights("clients", discounts))
    versions, models = {0: 1, 1: 2}, {1: {"v": torch.tensor([4.0])}, 2: {"v": torch.tensor([2.0])}}
    for version, model in models.items():
        model["w"] = torch.tensor([10.0 * version])
    here = {"v": torch.tensor([2.0]), "w": torch.tensor([20.0])}
    found = Started(versions, discounts, models, towards_model).rebase(total, here)
    # shares 3/8 and 1/4: the server's 2 keeps 3/8
    assert float(here["v"] + found.buffers["v"]) == 0.375 * 0.5 + 0.25 * 1.0 + 0.375 * 2.0
    # shares 1/4 and 1/2: to 11 and 22, or along 1 and 2
    assert float(found.update["w"]) == (0.25 * -9 + 0.5 * 2 if towards_model else 0.25 + 1.0)


@pytest.mark.slow
def test_a_resumed_run_ends_alike_with_clients_in_flight(tmp_path):
    def strategy():
        system = LogNormal(sigma=1.5, dropout=0.1, seed=2)
        return built(
            SCAFFOLD,
            asynchronous=Asynchronous(buffer=2),
            **slots(system, sampler=FixedSizeSampler(participation=0.67, seed=2)),
        )

    whole, reports = run(strategy(), 14, stores=folders(tmp_path / "whole", SIZE))
    assert any(report.dropped for report in reports[1:])
    first, saved = strategy(), {}

    def stop(report, arrays):
        if report.round == 6:
            saved["state"] = first.snapshot()
            first.state.mark_durable()
        return report.round == 8  # two steps are lost

    store = folders(tmp_path / "cut", SIZE)
    at_six = {}

    def watch(report, arrays):
        if report.round == 6:
            at_six["x"] = arrays
        return stop(report, arrays)

    run(first, 14, stores=store, on_round=watch)
    checkpoint = Checkpoint(to_tensors(at_six["x"]), saved["state"], "recipe")
    loaded = load_checkpoint(save_checkpoint(tmp_path, checkpoint), ["head.weight"])
    second = strategy()
    second.restore(loaded.state)
    resumed, later = run(second, 14, stores=store, initial=loaded.params)
    assert torch.equal(resumed, whole)
    assert later[-1].simulated_seconds == reports[-1].simulated_seconds


def test_a_step_without_a_valid_reply_is_saved_like_any_other(tmp_path):
    """What the server sent is then what it still has: one tensor by two names."""
    strategy = built(SCAFFOLD, asynchronous=Asynchronous(buffer=1), **slots(Constant()))
    trained, saved = iter(range(100)), []

    def lose(reply):
        lost = METRICS in reply.content and next(trained) in (1, 2)
        return None if lost else reply

    def save(report, arrays):
        checkpoint = Checkpoint(to_tensors(arrays), strategy.snapshot(), "recipe")
        saved.append(load_checkpoint(save_checkpoint(tmp_path, checkpoint), ["head.weight"]))

    _, reports = run(strategy, 5, tamper=lose, on_round=save)
    assert [len(report.clients) for report in reports[1:]] == [1, 0, 0, 1, 1]
    found = saved[-1].state.tensors["scaffold/control_variate"]["head.weight"]
    assert torch.equal(found, strategy.server_sides["scaffold"].control_variate["head.weight"])


def test_a_step_for_which_all_clients_were_tried_has_the_replies_of_those_that_finished():
    """FedAvg of the finished alone is the same step, as all train from the same model."""
    system = Constant(dropout=0.5)
    stepping = built(
        FedAvg, aggregator=UniformMean(), asynchronous=Asynchronous(buffer=SIZE), **slots(system)
    )
    found, reports = run(stepping, 4)
    waits = built(FedAvg, aggregator=UniformMean(), **slots(system))
    weight, expected = run(waits, 4)
    assert [len(report.clients) for report in reports] == [0, *map(finishing, range(1, 5))]
    assert [report.clients for report in reports] == [report.clients for report in expected]
    assert torch.equal(found, weight)


def finishing(round: int) -> int:
    return sum(not Constant(dropout=0.5).drops_out(round, client) for client in range(SIZE))


@pytest.mark.parametrize(
    ("method", "how", "named"),
    [
        (
            FedAvg,
            {"system": Constant(over_selection=1.3)},
            "asynchronous system.over_selection=1",
        ),
        (
            FedAvg,
            {"system": Constant(deadline_seconds=9.0)},
            "asynchronous system.deadline_seconds=null",
        ),
        (FedAvg, {"client_metrics": ClientMetrics(asked=True)}, "evaluation.clients=false"),
        (FedNova, {"system": Constant()}, "NormalizedMean"),
        (FedDyn, {"system": Constant()}, "asynchronous.discount=polynomial FedDynServer"),
        (FedExP, {"system": Constant()}, "aggregator ExtrapolatedMean"),
        (FedMRUR, {}, "aggregator NormMean"),
        (
            SCAFFOLD,
            {"system": Constant(), "secure_aggregation": SecAggPlus()},
            "asynchronous strategy/secure_aggregation",
        ),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(method, how, named):
    with refused(*named.split()):
        built(method, asynchronous=Asynchronous(), **how)


def test_a_momentum_of_updates_that_are_no_gradients_is_refused():
    """FedAsync's go to y_i from the server's model: FedCM's loop of them diverged."""
    with refused("strategy.asynchronous.towards_model=false", "client_momentum"):
        built(FedCM, asynchronous=Asynchronous(buffer=1, towards_model=True), system=Constant())
    built(FedCM, asynchronous=Asynchronous(buffer=2), system=Constant())


def test_clients_of_a_large_population_start_uniformly_among_those_that_are_free():
    system = DayNight(share=0.5, spread=0.0)  # all are there in the first half of the day
    present, busy, rng = range(10_000), set(range(5000)), np.random.default_rng(3)
    clients = SimulatedClients(Asynchronous(), FixedSizeSampler(), system, None)
    step = SimulatedStep(clients, Mock(), 0.0)
    drawn = [step._draw(present, busy, 100, rng) for _ in range(200)]
    assert all(len(set(one)) == 100 and one == sorted(one) for one in drawn)
    counts = np.histogram(np.concatenate(drawn), bins=10, range=(0, 10_000))[0]
    assert counts[:5].tolist() == [0] * 5
    assert np.abs(counts[5:] - 4000).max() < 5 * np.sqrt(4000 * 0.8)
    assert step._draw(present, {*range(9950)}, 100, rng) == [*range(9950, 10_000)]
    step.clock = 60_000.0
    assert step._draw(present, busy, 100, rng) == []  # at night
