"""ShuffleNet and MobileNetV2, the networks for small devices of FedDW's Table II.

ShuffleNet follows FedDW's code for images of 32x32 pixels; MobileNetV2 has that code's widths and
torchvision's blocks. Both have FedDW's mapping and head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.tasks.models.model import Model, Shape, mapped_model, require_size

LEAST_SIZE = 9  # after three halvings, BatchNorm still gets two values from one image
GROUPS = 2
# ShuffleNet's stages: channels and units; the first unit halves the image.
STAGES = ((200, 4), (400, 8), (800, 4))
# MobileNetV2's: expansion, channels, blocks, and the stride of the first.
BOTTLENECKS = (
    *((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
SHRINK = 2


class ShuffleUnit(nn.Module):
    """ShuffleNet's unit: grouped 1x1, channel shuffle, depthwise 3x3, grouped 1x1.

    Zhang et al., ShuffleNet, CVPR 2018, https://arxiv.org/abs/1707.01083, Figure 2 (b) and (c).

    Args:
        channels: channels of the inputs.
        wide: channels of the outputs.
        halve: halve the image; the pooled inputs are then concatenated instead of added.
        groups: groups of the first convolution.
    """

    def __init__(self, channels: int, wide: int, *, halve: bool, groups: int) -> None:
        super().__init__()
        new = wide - channels if halve else wide
        narrow = new // 4
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, narrow, 1, groups=groups, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            nn.ChannelShuffle(groups),
            nn.Conv2d(narrow, narrow, 3, 2 if halve else 1, 1, groups=narrow, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),  # in FedDW's code, not in the paper
            nn.Conv2d(narrow, new, 1, groups=GROUPS, bias=False),
            nn.BatchNorm2d(new),
        )
        self.pool = nn.AvgPool2d(3, 2, 1) if halve else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features of the unit's width."""
        new: Tensor = self.convolutions(inputs)
        if self.pool is None:
            return torch.relu(new + inputs)
        return torch.relu(torch.cat([new, self.pool(inputs)], dim=1))


def feddw_shufflenet(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return FedDW's ShuffleNet; 1,130,424 parameters on RGB images with 100 classes.

    Two groups and a 1x1 stem without halving: three stages of 200, 400 and 800 channels reduce
    32x32 pixels to 4x4.
    """
    require_size("feddw_shufflenet", input_shape, LEAST_SIZE)
    channels = 24
    stem = nn.Conv2d(input_shape[0], channels, 1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    groups = 1  # the stem's few channels are not grouped
    for wide, units in STAGES:
        for number in range(units):
            layers.append(ShuffleUnit(channels, wide, halve=number == 0, groups=groups))
            channels, groups = wide, GROUPS
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return mapped_model(layers, channels, num_classes, head_bias)


def feddw_mobilenetv2(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return FedDW's MobileNetV2; 791,428 parameters on RGB images with 100 classes.

    As in its code, "Shrink 2" halves every bottleneck's width and the last convolution's 1,280, not
    the stem's 32 channels; the stem and the second group of bottlenecks do not halve the image, so
    32x32 pixels become 4x4. The blocks are torchvision's, as in the MobileNetV2 paper
    (https://arxiv.org/abs/1801.04381); FedDW's code has ReLU instead of ReLU6, also expands in the
    first block, and projects the shortcut where only the width changes.
    """
    from torchvision.models.mobilenetv2 import InvertedResidual
    from torchvision.ops import Conv2dNormActivation

    require_size("feddw_mobilenetv2", input_shape, LEAST_SIZE)
    channels, last = 32, 1280 // SHRINK
    layers = [Conv2dNormActivation(input_shape[0], channels, activation_layer=nn.ReLU6)]
    for expansion, full_width, blocks, first_stride in BOTTLENECKS:
        for number in range(blocks):
            wide, stride = full_width // SHRINK, first_stride if number == 0 else 1
            layers.append(InvertedResidual(channels, wide, stride, expansion))
            channels = wide
    layers.append(Conv2dNormActivation(channels, last, 1, activation_layer=nn.ReLU6))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return mapped_model(layers, last, num_classes, head_bias)
