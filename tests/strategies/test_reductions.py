"""The reduction lattice: methods at their neutral setting equal their base, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from strategies.components.local_optimizers import SGD
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.components.samplers import FixedSizeSampler
from strategies.fedavg import FedAvg, FedAvgM
from strategies.fedprox import FedProx
from strategies.fedpvr import FedPVR
from strategies.round.federated import FederatedStrategy
from strategies.scaffold import SCAFFOLD
from tests.federation import TensorBatches, federate


class Classifier(nn.Module):
    """A small network with a hidden layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2))
            self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        features = self.body(inputs)
        return features, self.head(features)


def blobs(num_clients: int = 4) -> list[TensorBatches]:
    """Clients of unequal size that favour one class each."""
    generator = torch.Generator().manual_seed(1)
    datasets = []
    for i in range(num_clients):
        size = 17 + 6 * i
        labels = torch.randint(0, 3, (size,), generator=generator)
        labels[: size // 2] = i % 3
        inputs = torch.randn(size, 4, generator=generator) + 2 * F.one_hot(labels, 4)
        datasets.append(TensorBatches(inputs, labels, num_classes=3))
    return datasets


def run(strategy: FederatedStrategy, **how) -> dict[str, torch.Tensor]:
    """Return the params after six rounds with half the clients."""
    strategy.sampler = FixedSizeSampler(0.5, seed=2)
    params, _ = federate(
        strategy,
        blobs(),
        model=Classifier,
        loss=F.cross_entropy,
        rounds=6,
        options=LocalTrainingConfig(batch_size=8, epochs=2),
        **how,
    )
    return params


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def uniform(strategy_class, *args) -> FederatedStrategy:
    from strategies.components.aggregators import UniformMean

    return strategy_class(*args, aggregator=UniformMean(), local_lr=0.1)


def test_fedprox_at_zero_is_fedavg():
    assert_same(run(FedProx(0.0, local_lr=0.1)), run(FedAvg(local_lr=0.1)))


def test_fedprox_is_not_fedavg():
    assert not torch.equal(
        run(FedProx(1.0, local_lr=0.1))["head.weight"], run(FedAvg(local_lr=0.1))["head.weight"]
    )


def test_fedpvr_with_an_empty_mask_is_fedavg():
    assert_same(run(uniform(FedPVR, "none")), run(uniform(FedAvg)))


@pytest.mark.parametrize("option", ["I", "II"])
def test_fedpvr_with_a_full_mask_is_scaffold(option):
    assert_same(run(FedPVR("all", option, local_lr=0.1)), run(SCAFFOLD(option, local_lr=0.1)))


def test_fedpvr_corrects_only_its_tensors():
    strategy = FedPVR("last:2", local_lr=0.1)
    run(strategy)
    control = strategy.server_sides["fedpvr"].control_variate
    assert list(control) == ["head.weight", "head.bias"]
    assert all(value.abs().max() > 0 for value in control.values())


def test_server_momentum_zero_is_fedavg():
    assert_same(run(FedAvgM(momentum=0.0, lr=1.0, local_lr=0.1)), run(FedAvg(local_lr=0.1)))


def test_one_client_is_centralised_sgd():
    """K steps of one client a round, R rounds, equal K * R steps of plain SGD on its data."""
    data = blobs(1)[0]
    params, _ = federate(
        FedAvg(local_lr=0.1),
        [data],
        model=lambda: _without_dropout(),
        loss=F.cross_entropy,
        rounds=3,
        options=LocalTrainingConfig(batch_size=100, epochs=2),
    )
    model = _without_dropout()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs)[1], data.labels).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(params[name], value.detach(), atol=1e-6, rtol=1e-5)


def _without_dropout() -> nn.Module:
    model = Classifier()
    model.body[2] = nn.Identity()
    return model


def test_momentum_layers_leave_the_others_plain():
    """Momentum on no tensor equals no momentum; on all, it does not."""
    plain = run(uniform(FedAvg), optimizer=SGD)
    assert_same(run(uniform(FedAvg), optimizer=lambda: SGD(0.9, momentum_layers="none")), plain)
    some = run(uniform(FedAvg), optimizer=lambda: SGD(0.9, momentum_layers="last:2"))
    assert not torch.equal(some["head.weight"], plain["head.weight"])


def test_seed_decides_everything():
    """Twice the same seed: the same bits, though replies arrive in another order each round."""
    assert_same(run(SCAFFOLD(local_lr=0.1)), run(SCAFFOLD(local_lr=0.1)))
    other = run(SCAFFOLD(local_lr=0.1), seed=1)
    assert not torch.equal(other["head.weight"], run(SCAFFOLD(local_lr=0.1))["head.weight"])
