"""FedNTD, against numbers worked out by hand."""

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedhet import FedNTD
from fedhet.strategies.base import Step


def penalty(received: list[float], local: list[float], tau: float = 1.0) -> float:
    context: Any = SimpleNamespace(global_model=lambda inputs: (None, torch.tensor([received])))
    label, nothing = torch.tensor([0]), torch.zeros(1)
    step = Step({}, nothing, label, nothing, torch.tensor([local]), context)
    side = FedNTD(beta=2.0, tau=tau).client_sides["fedntd"]
    found = side.penalty(step)
    assert found is not None
    return found.item()


def test_the_divergence_by_hand():
    """Without class 0: q_x = (3/4, 1/4) and q_y = (1/2, 1/2); tau = 2 halves the logits."""
    expected = 2 * (3 / 4 * log(3 / 2) + 1 / 4 * log(1 / 2))
    assert penalty([9.0, log(3), 0.0], [5.0, 1.0, 1.0]) == pytest.approx(expected)
    assert penalty([9.0, 2 * log(3), 0.0], [5.0, 1.0, 1.0], tau=2.0) == pytest.approx(expected)


def test_only_the_true_class_may_change():
    assert penalty([9.0, 1.0, 2.0], [-9.0, 1.0, 2.0]) == pytest.approx(0)
