"""KeepFeatures' penalty, against a number worked out by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedhet import ConfigError
from fedhet.strategies.base import Step
from my_project.method import KeepFeatures, KeepFeaturesClient


def test_by_hand() -> None:
    """Two examples at the squared distances 9 + 16 and 1, with weight 2: 2 * (25 + 1) / 2."""
    received = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    features = torch.tensor([[3.0, 4.0], [1.0, 2.0]])
    context: Any = SimpleNamespace(received_features=lambda inputs: received)
    nothing = torch.zeros(1)
    found = KeepFeaturesClient(2.0).penalty(Step({}, nothing, nothing, features, nothing, context))
    assert found is not None
    assert found.item() == pytest.approx(26.0)


def test_a_weight_below_0_is_refused() -> None:
    with pytest.raises(ConfigError):
        KeepFeatures(weight=-1.0)
