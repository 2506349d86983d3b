"""A small perceptron to read Algorithm 1 with (docs/results/fedmrur.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def perceptron(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return d-64-64-C with biases and ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )
