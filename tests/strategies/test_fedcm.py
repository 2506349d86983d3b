"""FedCM against a plain loop of its algorithm."""

import pytest
import torch

from fedhet.strategies.components.aggregators import NormMean, UniformMean
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.schedules import ExponentialDecay
from fedhet.strategies.fedcm import FedCM
from tests.federation import Regression, TensorBatches, federate
from tests.strategies.test_closed_forms import clients, gradient

ROUNDS, EPOCHS, ALPHA, LR, DECAY = 4, 3, 0.3, 0.05, 0.9


def plain_loop(datasets, stretch=None, clip=None, weight_decay=0.0) -> torch.Tensor:
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
        delta = sum(updates) / len(updates)
        if stretch:
            delta = delta * sum(u.norm() for u in updates) / len(updates) / delta.norm()
        x, m = x + delta, -delta / (EPOCHS * lr)
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


def test_clients_of_unequal_length_count_by_their_mean_lr_sum():
    """Batches of 10: one client takes 2 steps of .1, the other 6: m = - Delta / .4."""
    draws = torch.randn(80, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    datasets = [TensorBatches(part[:, :2], part[:, 2]) for part in draws.split([20, 60])]
    strategy, options = FedCM(local_lr=0.1), LocalTrainingConfig(batch_size=10, epochs=1)
    params, _ = federate(strategy, datasets, model=lambda: Regression(2), rounds=1, options=options)
    sent = strategy.server_step.broadcast(0)["momentum"]["head.weight"]
    torch.testing.assert_close(sent, -params["head.weight"] / 0.4)
