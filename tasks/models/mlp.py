"""The multilayer perceptron of MA-Echo: 784-400-200-100-10, no biases."""

from __future__ import annotations

import itertools
import math

from torch import nn

from fedhet.tasks.models.model import Model, Shape


def mlp(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return the perceptron; 414,600 parameters on MNIST."""
    sizes = (math.prod(input_shape), 400, 200, 100)
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow, bias=False), nn.ReLU()]
    return Model(nn.Sequential(*layers), sizes[-1], num_classes, head_bias=bool(head_bias))
