"""FedDyn: rounds by hand, the optimum that FedAvg misses, its state, what it reduces to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message, RecordDict

from client_app.state import ContextStateStore
from conf import compose
from server_app.assembly import check_recipe
from strategies.base import Step
from strategies.components.aggregators import UniformMean
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.components.model_outputs import Latest, Participants
from strategies.components.samplers import FixedSizeSampler
from strategies.components.schedules import ExponentialDecay
from strategies.fedavg import FedAvg
from strategies.feddyn import DRIFT_SUM, FedDyn, FedDynClient
from tests.federation import Regression, TensorBatches, federate
from tests.recipes import overrides
from tests.strategies.round import test_round
from tests.strategies.test_closed_forms import STEPS, clients, distance, optimum
from tests.strategies.test_reductions import assert_same, run


class Listed:
    """A sampler: the given cohorts, from round 1 on, then everybody."""

    def __init__(self, *cohorts: list[int]) -> None:
        self.cohorts = cohorts

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the round's cohort."""
        if round <= len(self.cohorts):
            return self.cohorts[round - 1]
        return list(range(num_clients))


# ---- by hand -------------------------------------------------------------------------------------


def test_the_penalty_by_hand():
    """alpha .4, x = 0, y = (1; 2), h = (3; -1): .2 (1 + 4) + .4 (3 - 2) = 1.4.

    Gradient .4 (y + h) = (1.6; .4). An un-squared norm (PFLlib) has .2 y / sqrt(5) + .4 h, no
    quadratic term (FL-bench) .4 h.
    """
    params = {"w": torch.tensor([1.0], requires_grad=True), "v": torch.tensor([2.0])}
    params["v"].requires_grad_()
    context = SimpleNamespace(
        anchor={"w": torch.zeros(1), "v": torch.zeros(1)},
        state={DRIFT_SUM: {"w": torch.tensor([3.0]), "v": torch.tensor([-1.0])}},
    )
    value = FedDynClient(0.4).penalty(Step(params, None, None, None, None, context))
    assert value.item() == pytest.approx(1.4)
    value.backward()
    assert [p.grad.item() for p in params.values()] == pytest.approx([1.6, 0.4])


def two_scalars() -> list[TensorBatches]:
    """f_i = (a_i w - b_i)^2 / 2 with a = (1, 2), b = (1, 4)."""
    return [
        TensorBatches(
            torch.tensor([[a]], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
        )
        for a, b in ((1.0, 1.0), (2.0, 4.0))
    ]


def after(rounds: int, **slots) -> float:
    params, _ = federate(
        FedDyn(1.0, local_lr=0.1, sampler=Listed([0, 1], [1]), **slots),
        two_scalars(),
        model=lambda: Regression(1),
        rounds=rounds,
        options=LocalTrainingConfig(epochs=2),
    )
    return float(params["head.weight"])


def test_two_rounds_by_hand():
    """Alpha 1, eta_l .1, K = 2, x = 0; round 1 has both clients, round 2 only the second.

    Round 1: g = (-1, -8), y = (.1, .8); g + (y - x) = (-.9 + .1, -4.8 + .8), y = (.18, 1.2);
    Delta = .69, H = .69: given out .69, x = 1.38.
    Round 2: h = 1.2; g + h = -2.48 + 1.2, y = 1.508; g + h + (y - x) = -1.968 + 1.2 + .128,
    y = 1.572; Delta = .192, H = .69 + .192 / 2 = .786: given out 1.572, x = 2.358.
    """
    assert after(1) == pytest.approx(0.69, abs=1e-12)
    assert after(1, output=Latest()) == pytest.approx(1.38, abs=1e-12)
    assert after(2) == pytest.approx(1.572, abs=1e-12)
    assert after(2, output=Latest()) == pytest.approx(2.358, abs=1e-12)


# ---- closed forms --------------------------------------------------------------------------------


@pytest.mark.slow
def test_feddyn_reaches_the_optimum_where_fedavg_stalls():
    assert distance(FedAvg(local_lr=0.1), 40) > 0.1
    assert distance(FedDyn(1.5, local_lr=0.1), 50) < 1e-10
    assert distance(FedDyn(1.5, local_lr=0.1, output=Latest()), 50) < 1e-10


def test_feddyn_under_partial_participation():
    """One of two clients a round; FedAvg swings between the two."""
    sampler = FixedSizeSampler(0.5, seed=1)
    assert distance(FedAvg(local_lr=0.1, sampler=sampler), 40) > 0.1
    assert distance(FedDyn(1.5, local_lr=0.1, sampler=sampler), 110) < 1e-10


def test_feddyn_under_a_schedule():
    """h_i is a sum of displacements that no learning rate divides."""
    strategy = FedDyn(1.5, local_lr=0.1, schedule=ExponentialDecay(0.99))
    assert distance(strategy, 50) < 1e-8


def test_what_is_kept_at_the_optimum():
    """-alpha h_i is the gradient of client i's objective there, and H, their mean, zero."""
    datasets, alpha = clients(), 1.5
    stores = {i: ContextStateStore(RecordDict()) for i in range(2)}
    strategy = FedDyn(alpha, local_lr=0.1)
    federate(
        strategy,
        datasets,
        model=lambda: Regression(2),
        rounds=50,
        options=STEPS,
        stores=stores,
    )
    best = optimum(datasets)
    for i, data in enumerate(datasets):
        gradient = data.inputs.T @ (data.inputs @ best - data.labels) / len(data)
        kept = stores[i].load(strategy.state.experiment, 50)[DRIFT_SUM]["head.weight"][0]
        torch.testing.assert_close(-alpha * kept, gradient, atol=1e-8, rtol=0)
    mean = strategy.server_step.optimizer.drift_sum["head.weight"]
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-8, rtol=0)


@pytest.mark.parametrize("rounds", [1, 2])
def test_minus_alpha_h_is_the_gradient_where_training_reaches_the_minimum(rounds):
    """One client that minimises its objective: y is what is given out; also in later rounds."""
    (data, _), alpha = clients(), 2.0
    stores = {0: ContextStateStore(RecordDict())}
    strategy = FedDyn(alpha, local_lr=0.2)
    params, _ = federate(
        strategy,
        [data],
        model=lambda: Regression(2),
        rounds=rounds,
        options=LocalTrainingConfig(batch_size=100, epochs=300),
        stores=stores,
    )
    gradient = data.inputs.T @ (data.inputs @ params["head.weight"][0] - data.labels) / len(data)
    kept = stores[0].load(strategy.state.experiment, rounds)[DRIFT_SUM]["head.weight"][0]
    assert gradient.norm() > 0.01
    torch.testing.assert_close(-alpha * kept, gradient, atol=1e-9, rtol=0)


# ---- state ---------------------------------------------------------------------------------------


def lose_client_one_in_round_two(strategy: FedDyn):
    def tamper(reply: Message) -> Message | None:
        lost = test_round.from_client(reply, 1) and strategy.state.round == 1
        return None if lost else reply

    return tamper


def test_a_lost_reply_is_as_if_the_client_had_not_been_sampled():
    strategy = FedDyn(0.5, local_lr=0.1)
    lost, _ = test_round.run(strategy, rounds=4, tamper=lose_client_one_in_round_two(strategy))
    sampler = Listed([0, 1, 2], [0, 2])
    absent, _ = test_round.run(FedDyn(0.5, local_lr=0.1, sampler=sampler), rounds=4)
    assert torch.equal(lost["head.weight"], absent["head.weight"])


def test_the_server_keeps_the_mean_of_all_clients():
    """H = (1 / N) sum_i h_i, in the versions that count, after absences and a lost reply."""
    stores = {i: ContextStateStore(RecordDict()) for i in range(3)}
    strategy = FedDyn(0.5, local_lr=0.1, sampler=Listed([0, 1], [0, 1, 2], [0, 2], [1]))
    tamper = lose_client_one_in_round_two(strategy)
    test_round.run(strategy, rounds=5, tamper=tamper, stores=stores)
    assert strategy.state.committed == {0: 5, 1: 5, 2: 5}
    kept = [stores[i].load(strategy.state.experiment, 5)[DRIFT_SUM] for i in range(3)]
    mean = torch.stack([drift_sum["head.weight"] for drift_sum in kept]).mean(0)
    assert mean.norm() > 0.01
    torch.testing.assert_close(strategy.server_step.optimizer.drift_sum["head.weight"], mean)


# ---- reductions and recipes ----------------------------------------------------------------------


@pytest.mark.parametrize("output", [Latest(), Participants()], ids=["latest", "participants"])
def test_feddyn_at_zero_is_fedavg(output):
    """With the plain mean, to the last bit, and nothing is kept."""
    stores = {i: ContextStateStore(RecordDict()) for i in range(4)}
    strategy = FedDyn(0.0, local_lr=0.1, output=output)
    fedavg = run(FedAvg(aggregator=UniformMean(), local_lr=0.1))
    assert_same(run(strategy, stores=stores), fedavg)
    assert not any(store.records for store in stores.values())
    assert not any(strategy.server_step.optimizer.state_dict().values())


def test_feddyn_is_not_fedavg():
    fedavg = run(FedAvg(aggregator=UniformMean(), local_lr=0.1))
    feddyn = run(FedDyn(0.01, local_lr=0.1, output=Latest()))
    assert not torch.equal(feddyn["head.weight"], fedavg["head.weight"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=feddyn", "server.lr=0.5"], r"server\.lr=0\.5, .*feddyn needs server\.lr=1"),
        (["strategy=[feddyn,fedadam]"], "both replace the server_optimizer"),
        (["strategy=[feddyn,fedexp]"], "both replace the aggregator"),
        (["strategy=feddyn", "strategy/aggregator=weighted_mean"], r"aggregator.*UniformMean"),
        (["strategy=feddyn", "strategy/server_optimizer=adam"], r"optimizer.*FedDynServer"),
    ],
)
def test_what_it_cannot_be_combined_with(words, message):
    with pytest.raises(ValueError, match=message):
        check_recipe(compose(overrides(*words)))


def test_which_model_is_evaluated_is_free():
    recipe = compose(overrides("strategy=feddyn", "strategy/output=latest"))
    check_recipe(recipe)
    assert recipe.strategy.output["_target_"] == "strategies.components.model_outputs.Latest"


def test_alpha_must_not_be_negative():
    with pytest.raises(ValueError, match=r"strategy\.feddyn\.alpha=-0\.1"):
        FedDyn(-0.1)
