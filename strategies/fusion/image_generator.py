"""A generator of images from noise, and random views of images, as DENSE has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Generator(nn.Module):
    """Noise (B, z) to images (B, C, H, W) of pixels in [0, 1].

    DENSE's: a linear layer to a quarter of the size, then twice as large by nearest neighbours and
    through 3 x 3 convolutions with BatchNorm and leaky ReLU, two times. Always in training mode.

    Args:
        latent: z.
        width: channels before the last convolution; twice as many before them.
        shape: (C, H, W).
    """

    def __init__(self, latent: int, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, columns = shape
        self.start = (2 * width, math.ceil(height / 4), math.ceil(columns / 4))
        self.linear = nn.Linear(latent, math.prod(self.start))
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(size=(height, columns)),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew: N(0, .02^2), of BatchNorm N(1, .02^2); every bias is 0."""
        for module in self.modules():
            if not isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
                continue
            mean = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
            drawn = torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_(mean + 0.02 * drawn)
            if module.bias is not None:
                module.bias.zero_()

    def forward(self, noise: Tensor) -> Tensor:
        """Return images."""
        images: Tensor = self.blocks(self.linear(noise).unflatten(1, self.start))
        return images


def view(images: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Return every image cut from a copy with a black border, and half of them mirrored.

    Args:
        images: (B, C, H, W), 0 is black; the gradient passes through.
        padding: width of the border, in pixels; 0: nothing is cut.
        flip: mirror each left to right with probability 1/2.
        generator: draws the corners and which are mirrored.
    """
    if not padding and not flip:
        return images
    count, _, height, width = images.shape
    corners = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5 if flip else torch.zeros(count, 1)
    rows = corners[0] + torch.arange(height)  # (B, H)
    across = torch.arange(width).expand(count, width)
    columns = corners[1] + torch.where(mirrored.bool(), across.flip(1), across)  # (B, W)
    images = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    which = torch.arange(count)[:, None, None].to(images.device)
    rows, columns = rows.to(images.device), columns.to(images.device)
    return images[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
