"""Clients, replies and small networks for classification with three classes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.strategies.base import LocalContext, Reply
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.statistics.class_means import COUNTS, SUMS
from fedhet.strategies.statistics.soft_labels import SOFT_LABEL_SUMS
from tests.federation import TensorBatches, federate


class Classifier(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2))
            self.head = nn.Linear(8, 3, bias=bias)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(inputs)
        return features, self.head(features)


class WithoutDropout(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.body[2] = nn.Identity()


class Biasless(Classifier):
    def __init__(self) -> None:
        super().__init__(bias=False)


class PassThrough(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


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


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def context_of(
    model: nn.Module, data: TensorBatches | None = None, seed: int = 0, **how
) -> LocalContext:
    """Return a round at a client that has received ``model`` as it is now."""
    received = {name: value.clone() for name, value in model.state_dict().items()}
    context = LocalContext(
        model=model,
        loaded=received,
        shared=received,
        received={},
        data=data,
        round=1,
        **{"state": {}, "loss": F.cross_entropy, "batch_size": 8, "lr": 0.1, **how},
    )
    context.generator.manual_seed(seed)
    return context


def upload(client: int, sums: list[list[float]], counts: list[float]) -> Reply:
    sent = {SUMS: torch.tensor(sums), COUNTS: torch.tensor(counts)}
    return Reply(client, 1, 1, 0.1, {}, payloads={SOFT_LABEL_SUMS: sent})


def train(
    strategy: FederatedStrategy,
    rounds: int = 4,
    model: Callable[[], nn.Module] = Biasless,
    data: Sequence[TensorBatches] | None = None,
    batch_size: int = 8,
    epochs: int = 2,
    **how,
) -> tuple[dict[str, Tensor], list[RoundReport]]:
    """Return the params and the reports after some rounds; without ``data`` of four clients."""
    return federate(
        strategy,
        data or blobs(),
        model=model,
        loss=F.cross_entropy,
        rounds=rounds,
        **{"options": LocalTrainingConfig(batch_size=batch_size, epochs=epochs), **how},
    )
