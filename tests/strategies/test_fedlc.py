"""FedLC and logit adjustment, against numbers worked out by hand."""

from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedhet.strategies.base import Step
from fedhet.strategies.fedlc import FedLC, LogitAdjustment
from tests.strategies.sides import client_side

COUNTS = [16, 1, 0, 81]  # n^(-1/4): 1/2, 1, infinite, 1/3


def objective(side: Any, logits: list[float], label: int) -> tuple[float, torch.Tensor]:
    """Return the local objective of one example, and its gradient by the logits."""
    context: Any = SimpleNamespace(
        loss=F.cross_entropy,
        data=SimpleNamespace(class_counts=lambda: COUNTS),
        params={"head.weight": torch.zeros(1, dtype=torch.float64)},
    )
    side.begin(context)
    given = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([label])
    step = Step({}, given, labels, given, given, context)
    loss = F.cross_entropy(given, labels) + side.penalty(step)
    (slope,) = torch.autograd.grad(loss, given)
    return loss.item(), slope[0]


@pytest.mark.parametrize(
    ("side", "odds"),
    [
        (client_side(FedLC, tau=2.0), [exp(-1), exp(-2), 0.0, exp(-2 / 3)]),
        (client_side(LogitAdjustment), [16.0, 1.0, 0.0, 81.0]),
        (client_side(LogitAdjustment, tau=0.5), [4.0, 1.0, 0.0, 9.0]),
    ],
    ids=["fedlc", "balanced softmax", "half"],
)
def test_the_softmax_has_these_odds_and_none_for_a_class_that_the_client_lacks(side, odds):
    """Logits (0, log 3, 9, log 2) multiply the odds by (1, 3, -, 2)."""
    weights = [odd * times for odd, times in zip(odds, (1, 3, 1, 2), strict=True)]
    loss, slope = objective(side, [0.0, log(3), 9.0, log(2)], label=1)
    shares = [weight / sum(weights) for weight in weights]
    assert loss == pytest.approx(-log(shares[1]), rel=1e-12)
    expected = torch.tensor(shares, dtype=torch.float64) - torch.eye(4, dtype=torch.float64)[1]
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-15)
    assert slope[2] == 0.0
