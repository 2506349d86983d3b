"""DENSE's generator of images from noise, and random views of images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Generator(nn.Module):
    """Maps noise (B, z) to images (B, C, H, W) of pixels in [0, 1]; always in training mode.

    A linear layer to a quarter of the size, then twice nearest-neighbour upsampling and a 3 x 3
    convolution with BatchNorm and leaky ReLU; ``width`` channels before the last convolution.
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
        """Draw all weights anew: N(0, .02^2), of BatchNorm N(1, .02^2); biases are 0."""
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


@dataclass(frozen=True)
class Views:
    """Turns images of pixels in [0, 1] into inputs: randomly cropped and mirrored, normalised."""

    black: Tensor  # the input value of a pixel of 0 (C, 1, 1)
    white: Tensor  # the input value of a pixel of 1
    padding: int  # width of the black border that images are cropped from; 0: no crop
    flip: bool  # mirror half of the images
    generator: torch.Generator

    def __call__(self, images: Tensor) -> Tensor:
        """Return inputs (B, C, H, W); the gradient passes through."""
        return self.black + (self.white - self.black) * self.cropped(images)

    def cropped(self, images: Tensor) -> Tensor:
        """Return images cropped from copies with a black border, half of them mirrored."""
        padding, generator = self.padding, self.generator
        if not padding and not self.flip:
            return images
        count, _, height, width = images.shape
        corners = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
        mirrored = torch.zeros(count, 1)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
        rows = corners[0] + torch.arange(height)  # (B, H)
        across = torch.arange(width).expand(count, width)
        columns = corners[1] + torch.where(mirrored.bool(), across.flip(1), across)  # (B, W)
        images = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
        which = torch.arange(count)[:, None, None].to(images.device)
        rows, columns = rows.to(images.device), columns.to(images.device)
        return images[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
