"""Every penalty's gradient against finite differences, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from strategies.base import Step
from strategies.feddistill import FedDistillClient
from strategies.feddyn import DRIFT_SUM, FedDynClient
from strategies.fedproto import PrototypeClient
from strategies.fedprox import FedProxClient
from strategies.feduv import FedUVClient

PENALTIES = [
    FedProxClient(0.7),
    FedUVClient(),
    FedDistillClient(0.7),
    PrototypeClient(0.7),
    FedDynClient(0.7),
]


@pytest.mark.parametrize("side", PENALTIES, ids=lambda side: type(side).__name__)
def test_penalty_gradients(side):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchor = {"body.weight": draw(3, 2), "head.weight": draw(2, 3)}
    received = {
        "soft_labels": {"means": draw(2, 2).softmax(dim=1)},
        "prototypes": {"means": draw(2, 3)},
    }
    state = {DRIFT_SUM: {"body.weight": draw(3, 2), "head.weight": draw(2, 3)}}
    inputs, labels = draw(4, 2), torch.tensor([0, 1, 1, 0])

    def penalty(body, head):
        params = {"body.weight": body, "head.weight": head}
        features = inputs @ body.T
        context = SimpleNamespace(anchor=anchor, received=received, state=state)
        return side.penalty(Step(params, inputs, labels, features, features @ head.T, context))

    params = [draw(3, 2).requires_grad_(), draw(2, 3).requires_grad_()]
    assert torch.autograd.gradcheck(penalty, params)


def test_fedprox_by_hand():
    """mu / 2 (1^2 + 2^2) = 3.5 for mu 1.4."""
    step = Step(
        {"w": torch.tensor([1.0, 2.0])},
        None,
        None,
        None,
        None,
        SimpleNamespace(anchor={"w": torch.zeros(2)}),
    )
    assert FedProxClient(1.4).penalty(step).item() == pytest.approx(3.5)
