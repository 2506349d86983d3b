"""Clients, replies and a network without head bias, for what sends statistics by class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.base import LocalContext, Reply
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.round.federated import FederatedStrategy
from strategies.round.round_report import RoundReport
from strategies.statistics.class_means import COUNTS, SUMS
from strategies.statistics.soft_labels import SOFT_LABEL_SUMS
from tests.federation import TensorBatches, federate
from tests.recipes import TINY
from tests.strategies.test_reductions import blobs

QUICK = [*TINY, "local.epochs=1", "task.train_size=150", "task.test_size=20"]


class Biasless(nn.Module):
    """A hidden layer, dropout, and a head without bias."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2))
            self.head = nn.Linear(8, 3, bias=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(inputs)
        return features, self.head(features)


class PassThrough(nn.Module):
    """Its logits are its inputs."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


def context_of(model: nn.Module, data: TensorBatches, seed: int = 0) -> LocalContext:
    """Return a round at a client that has trained ``model``."""
    return LocalContext(
        model=model,
        received_state={},
        anchor={},
        received={},
        state={},
        data=data,
        loss=F.cross_entropy,
        round=1,
        batch_size=8,
        generator=torch.Generator().manual_seed(seed),
    )


def upload(client: int, sums: list[list[float]], counts: list[float]) -> Reply:
    """Return a reply with these soft-label sums and counts."""
    sent = {SUMS: torch.tensor(sums), COUNTS: torch.tensor(counts)}
    return Reply(client, 1, 1, 0.1, {}, payloads={SOFT_LABEL_SUMS: sent})


def train(
    strategy: FederatedStrategy, rounds: int = 4, model: Callable[[], nn.Module] = Biasless, **how
) -> tuple[dict[str, Tensor], list[RoundReport]]:
    """Return the params and the reports after some rounds of four clients with three classes."""
    return federate(
        strategy,
        blobs(),
        model=model,
        loss=F.cross_entropy,
        rounds=rounds,
        options=LocalTrainingConfig(batch_size=8, epochs=2),
        **how,
    )
