"""NIID-Bench's simple-cnn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def simple_cnn(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return the network for 32x32 images: 62,006 parameters for CIFAR-10."""
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)),
    )
