"""Plain convolutional networks: of FedAvg, FedDW and MA-Echo, and two that normalise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from fedhet.tasks.models.model import Model, Shape, mapped_model, require_size


def fedavg_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return McMahan et al.'s CNN without padding; 582,026 parameters on MNIST."""
    height, width = _after_two_convolutions("fedavg_cnn", input_shape)
    body = nn.Sequential(
        # ReLU after pooling: the same function and gradient on a quarter of the pixels
        *(nn.Conv2d(input_shape[0], 32, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * height * width, 512), nn.ReLU()),
    )
    return Model(body, 512, num_classes, head_bias=head_bias is not False)


def feddw_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return FedDW's CNN; 121,642 parameters on grey images, 139,714 on RGB images."""
    channels = input_shape[0]
    height, width = _after_two_convolutions("feddw_cnn", input_shape)
    narrow, wide, dropout = (10, 20, [nn.Dropout(0.5)]) if channels == 1 else (6, 16, [])
    layers: list[nn.Module] = [
        *(nn.Conv2d(channels, narrow, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(narrow, wide, 5), *dropout, nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    ]
    return mapped_model(layers, wide * height * width, num_classes, head_bias)


def maecho_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return MA-Echo's CNN without biases; 4,971,368 parameters on RGB images with 10 classes.

    As in its released code, linear layers start Xavier normal and convolutions as in PyTorch.
    """
    require_size("maecho_cnn", input_shape, 8)
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for wide in (64, 128, 256):
        layers += [nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.ReLU()]
        layers += [nn.Dropout(0.2), nn.MaxPool2d(2)]
        channels = wide
    layers.append(nn.Flatten())
    features = channels * (input_shape[1] // 8) * (input_shape[2] // 8)
    for wide in (1000, 500):
        layers += [nn.Linear(features, wide, bias=False), nn.ReLU()]
        features = wide
    model = Model(nn.Sequential(*layers), features, num_classes, head_bias=bool(head_bias))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return model


def gn_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return a small CNN with GroupNorm(2); 96,298 parameters on RGB images with 10 classes.

    Three strided convolutions and the mean over the image: our own, for many rounds on a CPU.
    """
    return _strided_cnn(input_shape, num_classes, partial(nn.GroupNorm, 2), head_bias)


def bn_cnn(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return gn_cnn with BatchNorm, for methods that keep it at the clients (FedBN)."""
    return _strided_cnn(input_shape, num_classes, nn.BatchNorm2d, head_bias)


def _strided_cnn(
    input_shape: Shape,
    num_classes: int,
    norm: Callable[[int], nn.Module],
    head_bias: bool | None,
) -> Model:
    layers: list[nn.Module] = []
    channels, size = input_shape[0], 5
    for wide in (32, 64, 128):
        layers.append(nn.Conv2d(channels, wide, size, stride=2, padding=size // 2, bias=False))
        layers += [norm(wide), nn.ReLU(inplace=True)]
        channels, size = wide, 3
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Model(body, channels, num_classes, head_bias=head_bias is not False)


def _after_two_convolutions(name: str, input_shape: Shape) -> tuple[int, int]:
    """Return the image size after two rounds of an unpadded 5x5 convolution and a halving."""
    require_size(name, input_shape, 16)
    height, width = (((size - 4) // 2 - 4) // 2 for size in input_shape[1:])
    return height, width
