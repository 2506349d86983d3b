"""The plain convolutional networks: FedAvg's and FedDW's two."""

from __future__ import annotations

from torch import nn

from tasks.errors import ConfigError
from tasks.models.model import Model

Shape = tuple[int, int, int]


def fedavg_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return McMahan et al.'s CNN without padding; 582,026 parameters on MNIST."""
    height, width = _after_two_convolutions("fedavg_cnn", input_shape)
    body = nn.Sequential(
        # ReLU after pooling is the same function with the same gradient, on a quarter of the pixels
        nn.Conv2d(input_shape[0], 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * height * width, 512),
        nn.ReLU(),
    )
    return Model(body, 512, num_classes, head_bias=head_bias is not False)


def feddw_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return FedDW's CNN: for grey images 121,642 parameters, for RGB images 139,714.

    Its features are a 128-dimensional mapping without activation. FedDW's text wants a head without
    bias (``task.head_bias=false``); its code, and the counts above, have one.
    """
    channels = input_shape[0]
    height, width = _after_two_convolutions("feddw_cnn", input_shape)
    if channels == 1:
        wide = 20
        convolutions = [
            *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, 5), nn.Dropout(0.5), nn.MaxPool2d(2), nn.ReLU()),
        ]
    else:
        wide = 16
        convolutions = [
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        ]
    mapping = [nn.Flatten(), nn.Linear(wide * height * width, 256), nn.ReLU(), nn.Linear(256, 128)]
    body = nn.Sequential(*convolutions, *mapping)
    return Model(body, 128, num_classes, head_bias=head_bias is not False)


def _after_two_convolutions(name: str, input_shape: Shape) -> tuple[int, int]:
    """Return the size after two times a 5x5 convolution without padding and a halving."""
    height, width = (((size - 4) // 2 - 4) // 2 for size in input_shape[1:])
    if min(height, width) < 1:
        raise ConfigError(
            f"task.model={name} needs images of at least 16x16 pixels and these are "
            f"{input_shape[1]}x{input_shape[2]}: choose another task.model (mlp) or task.image_size"
        )
    return height, width
