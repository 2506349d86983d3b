"""FedCM against a plain loop of its algorithm."""

from dataclasses import replace

import pytest
import torch

from fedhet.strategies.base import Cohort, Reply
from fedhet.strategies.components.aggregators import NormMean, UniformMean
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.schedules import ExponentialDecay
from fedhet.strategies.fedcm import ClientMomentumServer, FedCM
from tests.federation import Regression, TensorBatches, federate
from tests.strategies.sides import total_of
from tests.strategies.test_closed_forms import clients, gradient

ROUNDS, EPOCHS, ALPHA, LR, DECAY = 4, 3, 0.3, 0.05, 0.9


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
    strategy = FedCM(ALPHA, aggregator=aggregator, local_lr=LR, schedule=ExponentialDecay(DECAY))
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
    strategy = FedCM(ALPHA, aggregator=NormMean(), local_lr=LR, schedule=ExponentialDecay(DECAY))
    strategy.server_sides["client_momentum"].source = "mean"
    options = LocalTrainingConfig(batch_size=100, epochs=EPOCHS)
    params, _ = federate(
        strategy, clients(), model=lambda: Regression(2), rounds=ROUNDS, options=options
    )
    expected = plain_loop(clients(), stretch=True, of_mean=True)
    torch.testing.assert_close(params["head.weight"][0], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["aggregate", "mean"])
@pytest.mark.parametrize("aggregator", [UniformMean(), NormMean()])
def test_steps_tend_to_the_length_that_is_predicted_from_the_gradients(aggregator, source, caplog):
    """Gradients drawn anew each round, in 20,000 dimensions: all but orthogonal."""
    random = torch.Generator().manual_seed(1)
    side = ClientMomentumServer(0.1, source)
    side.init({"w": torch.zeros(20_000)})
    lengths = []
    for round in range(1, 61):
        pull = -0.9 * LR * side.broadcast(0)["momentum"]["w"]
        grads = [torch.randn(20_000, generator=random) * LR for _ in range(10)]
        updates = [{"w": 0.1 * grad + pull} for grad in grads]
        replies = [Reply(client, 1, 1, LR, update) for client, update in enumerate(updates)]
        total = total_of(replies)
        delta = aggregator({"w": torch.zeros(20_000)}, total)
        side.reduce(total, delta, Cohort(round, 10, 10))
        lengths.append(delta["w"].norm().item())
    figures = side.metrics()
    rms = sum(grad.norm() ** 2 for grad in grads).div(10).sqrt().item()
    assert figures["gradient_reach"] == pytest.approx(rms, rel=1e-4)
    assert figures["effective_step"] == pytest.approx(sum(lengths[-10:]) / 10, rel=0.03)
    stretched = isinstance(aggregator, NormMean) and source == "aggregate"
    assert ("local.lr" in caplog.text) == stretched  # 3.2 times the mean
    side.reduce(total, delta, Cohort(61, 10, 10, summed=True))
    assert side.metrics().keys() == {"effective_step"}
    if stretched:
        assert figures["effective_step"] == pytest.approx(0.1 / 0.19**0.5 * rms)


def test_momentum_of_late_replies_has_the_size_of_their_gradients():
    """A constant gradient g, and two replies of which each counts half: m -> g, and not less."""
    side, gradient = ClientMomentumServer(ALPHA), torch.tensor([3.0, -4.0])
    side.init({"w": torch.zeros(2)})
    for round in range(1, 31):
        update = -LR * (ALPHA * gradient + (1 - ALPHA) * side.broadcast(0)["momentum"]["w"])
        replies = [Reply(client, 1, 1, LR, {"w": update}, norms={"w": 1.0}) for client in (0, 1)]
        stale = replace(total_of(replies), weights=[0.25, 0.25], update={"w": update / 2})
        side.reduce(stale, stale.update, Cohort(round, 2, 10))
    torch.testing.assert_close(side.broadcast(0)["momentum"]["w"], gradient, rtol=1e-4, atol=0)


def test_clients_of_unequal_length_count_by_their_mean_lr_sum():
    """Batches of 10: one client takes 2 steps of .1, the other 6: m = - Delta / .4."""
    draws = torch.randn(80, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    datasets = [TensorBatches(part[:, :2], part[:, 2]) for part in draws.split([20, 60])]
    strategy, options = FedCM(local_lr=0.1), LocalTrainingConfig(batch_size=10, epochs=1)
    params, _ = federate(strategy, datasets, model=lambda: Regression(2), rounds=1, options=options)
    sent = strategy.server_step.broadcast(0)["momentum"]["head.weight"]
    torch.testing.assert_close(sent, -params["head.weight"] / 0.4)
