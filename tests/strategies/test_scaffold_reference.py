"""SCAFFOLD against its equations, written out for scalars: no fixed point hides a wrong scale.

A wrong K, a decayed or undecayed rate and |S| for N in c leave the optimum where it is (they only
damp or shift c), so only the path of x shows them.
"""

from __future__ import annotations

import pytest
import torch

from strategies.components.local_training_config import LocalTrainingConfig
from strategies.scaffold import SCAFFOLD
from tests.federation import Regression, TensorBatches, federate

SLOPES, TARGETS, EXAMPLES, EPOCHS, LR, START = (1.0, 2.0), (1.0, 4.0), 3, 2, 0.1, 0.5
COHORTS = {1: [0], 2: [1], 3: [0], 4: [0, 1], 5: [1]}


class Halving:
    """A schedule: 1, 1/2, 1/4, ..."""

    def __call__(self, round: int, num_rounds: int) -> float:
        return 0.5 ** (round - 1)


class Listed:
    """A sampler: one of two clients a round, in round 4 both."""

    def sample(self, round: int, num_clients: int) -> list[int]:
        return COHORTS[round]


def by_the_equations() -> float:
    """Equations 3 to 5 with option II; f_i = (a_i w - b_i)^2 / 2, full batches, K = EPOCHS."""
    x, c, local = START, 0.0, [0.0, 0.0]
    for t, cohort in COHORTS.items():
        lr = LR * 0.5 ** (t - 1)
        updates, deltas = [], []
        for i in cohort:
            y = x
            for _ in range(EPOCHS):
                y -= lr * (SLOPES[i] * (SLOPES[i] * y - TARGETS[i]) - local[i] + c)
            new = local[i] - c + (x - y) / (EPOCHS * lr)
            updates.append(y - x)
            deltas.append(new - local[i])
            local[i] = new
        x += sum(updates) / len(cohort)
        c += sum(deltas) / 2
    return x


def test_scaffold_follows_its_equations():
    datasets = [
        TensorBatches(
            torch.full((EXAMPLES, 1), a, dtype=torch.float64),
            torch.full((EXAMPLES,), b, dtype=torch.float64),
        )
        for a, b in zip(SLOPES, TARGETS, strict=True)
    ]
    params, _ = federate(
        SCAFFOLD(local_lr=LR, schedule=Halving(), sampler=Listed()),
        datasets,
        model=lambda: Regression(1),
        rounds=5,
        options=LocalTrainingConfig(batch_size=100, epochs=EPOCHS),
        initial={"head.weight": torch.tensor([[START]], dtype=torch.float64)},
    )
    assert float(params["head.weight"]) == pytest.approx(by_the_equations(), abs=1e-12)
