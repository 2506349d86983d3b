"""VGG-11 without batch normalisation, as in FedPVR's code."""

from __future__ import annotations

import math

from torch import nn

from fedhet.tasks.models.model import Model, Shape, require_size

WIDTHS = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)  # None: halve


def vgg11(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return the network; on 32x32 RGB 9,750,922 parameters with 10 classes, 9,797,092 with 100.

    FedPVR's classifier is all three linear layers: the last six tensors.
    """
    require_size("vgg11", input_shape, 32)
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in WIDTHS:
        if wide is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [_convolution(channels, wide), nn.ReLU(inplace=True)]
            channels = wide
    flat = channels * (height // 32) * (width // 32)
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(flat, 512), nn.ReLU()]
    layers += [nn.Dropout(0.5), nn.Linear(512, 512), nn.ReLU()]
    body, biased = nn.Sequential(*layers), head_bias is not False
    return Model(body, 512, num_classes, head_bias=biased, classifier_tensors=4)


def _convolution(channels: int, wide: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, wide, 3, padding=1)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (9 * wide)))
    return layer
