"""ResNet-8 (FedPVR) and ResNet-18 with group or batch normalisation (FedMRUR, FedDW)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.common.errors import require_choice
from fedhet.tasks.models.model import Model, Shape, mapped_model, require_size


def group_norm(channels: int) -> nn.Module:
    """Return GroupNorm over two groups of channels."""
    return nn.GroupNorm(2, channels)


class Block(nn.Module):
    """Two 3x3 convolutions, the first with a stride, and a shortcut.

    The shortcut projects if the shape changes.
    """

    def __init__(
        self,
        channels: int,
        wide: int,
        stride: int,
        *,
        norm: Callable[[int], nn.Module] = group_norm,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, wide, 3, stride, 1, bias=bias),
            norm(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=bias),
            norm(wide),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != wide:
            projection = nn.Conv2d(channels, wide, 1, stride, bias=bias)
            self.shortcut = nn.Sequential(projection, norm(wide))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features of the block's width."""
        features: Tensor = self.activation(self.convolutions(inputs) + self.shortcut(inputs))
        return features


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution with padding 1 that leaves out the weights which meet only padding.

    If its output is one pixel, the image is 1x1 (one weight of nine meets it) or 2x2 (four do).
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the convolution returns, (B, O, H, W), to rounding."""
        if inputs.shape[2:] == (1, 1):
            met = slice(1, 2)
        elif inputs.shape[2:] == (2, 2) and self.stride == (2, 2):
            met = slice(1, 3)
        else:
            return super().forward(inputs)
        weight = self.weight
        if weight.is_contiguous(memory_format=torch.channels_last):
            # so its gradient lies as the weight does: autograd would copy any other
            weight, inputs = weight.permute(0, 2, 3, 1)[:, met, met], inputs.permute(0, 2, 3, 1)
        else:
            weight = weight[:, :, met, met]
        return F.linear(inputs.flatten(1), weight.flatten(1), self.bias)[..., None, None]


class BasicBlock(nn.Module):
    """A block of :class:`ResNet18`: as :class:`Block`, by the names that torchvision has."""

    def __init__(
        self, channels: int, wide: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        projection = None
        if stride != 1 or channels != wide:
            projection = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), norm(wide))
        self.conv1 = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.bn1 = norm(wide)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.bn2 = norm(wide)
        self.downsample = projection

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features of the block's width."""
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        features = self.relu(self.bn1(self.conv1(inputs)))
        features = self.bn2(self.conv2(features))
        features += shortcut
        return self.relu(features)  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """ResNet-18 without its head: torchvision's names, and its numbers from the same seed.

    Importing torchvision takes a second, since it brings PyTorch's compiler.
    """

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1, norm), BasicBlock(64, 64, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2, norm), BasicBlock(128, 128, 1, norm))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2, norm), BasicBlock(256, 256, 1, norm))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2, norm), BasicBlock(512, 512, 1, norm))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        nn.Linear(512, 1000)  # draws the numbers of ImageNet's head
        self.fc = nn.Identity()
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return 512 features of each image."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(inputs))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(self.avgpool(features).flatten(1))  # type: ignore[no-any-return]


def resnet8(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return the CIFAR ResNet with n=1; 78,042 parameters with 10 classes, 83,892 with 100."""
    stem = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)
    body = nn.Sequential(
        *(stem, group_norm(16), nn.ReLU(inplace=True)),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    for layer in body.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return Model(body, 64, num_classes, head_bias=head_bias is not False)


def resnet18_gn(
    input_shape: Shape, num_classes: int, *, head_bias: bool | None, stem: str | None
) -> Model:
    """Return torchvision's ResNet-18 with GroupNorm(2); the default stem is imagenet."""
    return _resnet18(input_shape, num_classes, group_norm, head_bias, stem or "imagenet")


def resnet18_bn(
    input_shape: Shape, num_classes: int, *, head_bias: bool | None, stem: str | None
) -> Model:
    """Return torchvision's ResNet-18 with BatchNorm; the default stem is cifar."""
    least = 33 if stem == "imagenet" else 9  # BatchNorm needs two values from one image
    require_size("resnet18_bn", input_shape, least)
    return _resnet18(input_shape, num_classes, nn.BatchNorm2d, head_bias, stem or "cifar")


def _resnet18(
    input_shape: Shape,
    num_classes: int,
    norm: Callable[[int], nn.Module],
    head_bias: bool | None,
    stem: str,
) -> Model:
    require_choice("task.stem", stem, ("imagenet", "cifar"))
    body = ResNet18(norm)
    for block in body.layer4:  # one pixel, if the image has 32x32 and the stem is ImageNet's
        block.conv1.__class__ = block.conv2.__class__ = Conv3x3
    channels = input_shape[0]
    if stem == "cifar":
        body.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        body.maxpool = nn.Identity()
    elif channels != 3:
        body.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")
    return Model(body, 512, num_classes, head_bias=head_bias is not False)


def feddw_resnet18(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return FedDW's ResNet-18; 11,350,756 parameters on RGB images with 100 classes.

    A 3x3 stem without pooling, BatchNorm, and unlike torchvision a bias in every convolution.
    """
    require_size("feddw_resnet18", input_shape, 9)  # BatchNorm needs two values from one image
    stem = nn.Conv2d(input_shape[0], 64, 3, padding=1)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    channels = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers.append(Block(channels, wide, stride, norm=nn.BatchNorm2d, bias=True))
        layers.append(Block(wide, wide, 1, norm=nn.BatchNorm2d, bias=True))
        channels = wide
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return mapped_model(layers, channels, num_classes, head_bias)
