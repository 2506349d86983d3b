"""FedCM against a plain loop of its algorithm."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fedhet.strategies.base import Cohort, LocalSummary, Norms, Reply
from fedhet.strategies.components.aggregators import NormMean, UniformMean, WeightedMean
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.schedules import ExponentialDecay
from fedhet.strategies.fedcm import MOMENTUM, ClientMomentum, FedCM
from fedhet.strategies.fednova import REACH, NormalizedMean
from fedhet.strategies.modes.robust.aggregator import RobustAggregator
from fedhet.strategies.modes.robust.clipping import CenteredClipping
from fedhet.strategies.modes.robust.coordinates import Median
from fedhet.strategies.modes.robust.geometric_median import GeometricMedian
from fedhet.strategies.modes.robust.selection import MultiKrum
from fedhet.strategies.round.reply_fold import Weights, sum_of
from tests.federation import Regression, TensorBatches, federate
from tests.refused import refused
from tests.strategies.sides import built, client_side, server_side, total_of
from tests.strategies.test_closed_forms import clients, gradient

ROUNDS, EPOCHS, ALPHA, LR, DECAY = 4, 3, 0.3, 0.05, 0.9
ONE = torch.ones(1)


def plain_loop(datasets, stretch=None, clip=None, weight_decay=0.0, of_mean=False):
    """FedCM's Algorithm 2 on two quadratics, all steps on all of a client's data."""
    x, m = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for round in range(1, ROUNDS + 1):
        lr, updates = LR * DECAY ** (round - 1), []
        for data in datasets:
            y = x.clone()
            for _ in range(EPOCHS):
                v = ALPHA * gradient(data, y) + (1 - ALPHA) * m
                if clip is not None and v.norm() > clip:
                    v = v * clip / v.norm()
                y = y - lr * (v + weight_decay * y)
            updates.append(y - x)
        mean = delta = sum(updates) / len(updates)
        if stretch:
            delta = delta * sum(u.norm() for u in updates) / len(updates) / delta.norm()
        x, m = x + delta, -(mean if of_mean else delta) / (EPOCHS * lr)
    return x


@pytest.mark.parametrize(
    ("aggregator", "clip", "weight_decay"),
    [(UniformMean(), None, 0.0), (NormMean(), None, 0.0), (UniformMean(), 0.7, 0.02)],
)
def test_fedcm_is_its_algorithm(aggregator, clip, weight_decay):
    """Under a schedule: m has the step sizes of the round that made it. Clipping sees v."""
    strategy = built(
        FedCM,
        client_momentum={"alpha": ALPHA},
        aggregator=aggregator,
        local_lr=LR,
        schedule=ExponentialDecay(decay=DECAY),
    )
    params, _ = federate(
        strategy,
        clients(),
        model=lambda: Regression(2),
        rounds=ROUNDS,
        optimizer=lambda: SGD(weight_decay=weight_decay),
        options=LocalTrainingConfig(batch_size=100, epochs=EPOCHS, clip=clip),
    )
    expected = plain_loop(clients(), isinstance(aggregator, NormMean), clip, weight_decay)
    torch.testing.assert_close(params["head.weight"][0], expected, rtol=1e-6, atol=1e-9)


def test_momentum_of_the_mean_leaves_out_the_aggregates_stretch():
    strategy = built(
        FedCM,
        client_momentum={"alpha": ALPHA},
        aggregator=NormMean(),
        local_lr=LR,
        schedule=ExponentialDecay(decay=DECAY),
    )
    strategy.server_sides["client_momentum"].source = "mean"
    options = LocalTrainingConfig(batch_size=100, epochs=EPOCHS)
    params, _ = federate(
        strategy, clients(), model=lambda: Regression(2), rounds=ROUNDS, options=options
    )
    expected = plain_loop(clients(), stretch=True, of_mean=True)
    torch.testing.assert_close(params["head.weight"][0], expected, rtol=1e-6, atol=1e-9)


def test_momentum_of_late_replies_has_the_size_of_their_gradients():
    """A constant gradient g, and two replies of which each counts half: m -> g, and not less."""
    side, gradient = server_side(ClientMomentum, alpha=ALPHA), torch.tensor([3.0, -4.0])
    side.init({"w": torch.zeros(2)})
    for round in range(1, 31):
        update = -LR * (ALPHA * gradient + (1 - ALPHA) * side.broadcast(0)["momentum"]["w"])
        norms = Norms({"w": 1.0})
        replies = [Reply(client, 1, 1, LR, {"w": update}, norms=norms) for client in (0, 1)]
        stale = replace(total_of(replies), weights=[0.25, 0.25], update={"w": update / 2})
        side.reduce(stale, stale.update, Cohort(round, 2, 10))
    torch.testing.assert_close(side.broadcast(0)["momentum"]["w"], gradient, rtol=1e-4, atol=0)


def after_rounds_of_a_constant_gradient(aggregator, steps, claimed, examples) -> list[float]:
    """Return |m| after each of 40 rounds of honest updates, with the gradient 1."""
    side, momenta = server_side(ClientMomentum, alpha=0.1), []
    side.init({"w": torch.zeros(1)})
    weighting = getattr(aggregator, "weighs", None) or aggregator.weighting
    robust = isinstance(aggregator, RobustAggregator)
    for round in range(1, 41):
        direction = 0.1 + 0.9 * side.broadcast(0)["momentum"]["w"]
        replies = [
            Reply(i, n, k, k * LR, {"w": -k * LR * direction}, {REACH: {"reach": k * LR * ONE}})
            for i, (k, n) in enumerate(zip(steps, examples, strict=True))
        ]
        replies = [replace(r, lr_sum=k * LR) for r, k in zip(replies, claimed, strict=True)]
        total = sum_of(replies, Weights(weighting))
        if robust:
            total = aggregator.combine({"w": torch.zeros(1)}, total, replies, round)
        single = isinstance(aggregator, NormalizedMean)
        delta = aggregator({"w": torch.zeros(1)}, replies if single else total)
        side.reduce(total, delta, Cohort(round, len(steps), len(steps), robust=robust))
        momenta.append(float(side.broadcast(0)["momentum"]["w"].norm()))
    return momenta


@pytest.mark.parametrize(
    "aggregator", [UniformMean(), WeightedMean(), NormMean(), NormalizedMean()], ids=type
)
def test_momentum_tends_to_the_gradient_however_clients_are_weighed(aggregator):
    """100 steps and 10, with examples in proportion: m <- .1 g + .9 m, as with equal clients."""
    found = after_rounds_of_a_constant_gradient(aggregator, [100, 10], [100, 10], [3200, 320])
    assert found == pytest.approx([1 - 0.9**t for t in range(1, 41)], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [1, 2000])
@pytest.mark.parametrize(
    "rule", [Median, partial(MultiKrum, attackers=2), CenteredClipping, GeometricMedian]
)
def test_momentum_is_no_longer_than_the_gradient_where_clients_lie_about_their_steps(rule, lie):
    """Two of ten, whose updates are honest; the others take 10 to 40 steps, the median 20."""
    steps = [20, 20, 10, 10, 15, 20, 20, 20, 40, 40]
    claimed = [lie, lie, *steps[2:]]
    found = after_rounds_of_a_constant_gradient(rule(), steps, claimed, [100] * 10)
    assert 0.3 < found[-1] <= 1.0 + 1e-5
    assert max(found) <= 1.0 + 1e-5


def test_phases_that_train_shared_tensors_for_different_times_are_refused():
    side, context = (
        client_side(ClientMomentum),
        SimpleNamespace(received={MOMENTUM: {"a": ONE, "b": ONE}}),
    )
    assert side.end(context, LocalSummary(40, 4, 0.4, {"b": 0.0})) == {}
    with refused("strategy.phases"):
        side.end(context, LocalSummary(40, 4, 0.4, {"b": 0.1}))


def test_clients_of_unequal_length_count_by_their_mean_lr_sum():
    """Batches of 10: one client takes 2 steps of .1, the other 6: m = - Delta / .4."""
    draws = torch.randn(80, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    datasets = [TensorBatches(part[:, :2], part[:, 2]) for part in draws.split([20, 60])]
    strategy, options = built(FedCM, local_lr=0.1), LocalTrainingConfig(batch_size=10, epochs=1)
    params, _ = federate(strategy, datasets, model=lambda: Regression(2), rounds=1, options=options)
    sent = strategy.server_step.broadcast(0)["momentum"]["head.weight"]
    torch.testing.assert_close(sent, -params["head.weight"] / 0.4)
