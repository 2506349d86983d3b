"""Augmentation and normalisation of whole batches, on the device of the images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """What happens to raw pixels before the model sees them.

    The order is flip, crop, normalise: a crop's border is black, 0 before normalisation.

    Attributes:
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
        flip: mirror each training image left to right with probability 1/2.
        crop_padding: cut each training image from a copy padded by so many pixels; 0: no crop.
        crop_probability: of a training image to be cut so.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop_padding: int = 0
    crop_probability: float = 1.0

    @property
    def augments(self) -> bool:
        """Whether training images differ from test images."""
        return self.flip or self.crop_padding > 0

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return scale and shift (C,): an input is pixel * scale + shift, for pixels 0..255."""
        scale = torch.tensor([1 / (255 * std) for std in self.std], device=device)
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        return scale, torch.tensor(shift, device=device)


@dataclass(frozen=True)
class Augmentation:
    """The random choices for the images of one pass, drawn at once: one transfer to the device.

    Attributes:
        flipped: (n,) bool.
        top: (n,) first row of the cut, in the padded image.
        left: (n,) first column of the cut, in the padded image.
    """

    flipped: Tensor
    top: Tensor
    left: Tensor

    @classmethod
    def draw(cls, transform: Transform, size: int, generator: torch.Generator) -> Augmentation:
        """Draw for ``size`` images."""
        device = generator.device
        flipped = torch.zeros(size, dtype=torch.bool, device=device)
        corners = torch.full((size, 2), transform.crop_padding, device=device)
        if transform.flip:
            flipped = torch.rand(size, generator=generator, device=device) < 0.5
        if transform.crop_padding:
            cuts = torch.randint(
                2 * transform.crop_padding + 1, (size, 2), generator=generator, device=device
            )
            if transform.crop_probability < 1:
                cut = torch.rand(size, generator=generator, device=device)
                corners = torch.where((cut < transform.crop_probability)[:, None], cuts, corners)
            else:
                corners = cuts
        return cls(flipped, corners[:, 0], corners[:, 1])

    def to(self, device: torch.device) -> Augmentation:
        """Return a copy on the device."""
        return Augmentation(self.flipped.to(device), self.top.to(device), self.left.to(device))

    def split(self, batch_size: int) -> Iterator[Augmentation]:
        """Yield the choices batch by batch."""
        choices = (self.flipped, self.top, self.left)
        for parts in zip(*(torch.split(values, batch_size) for values in choices), strict=True):
            yield Augmentation(*parts)

    def apply(self, padded: Tensor, chosen: Tensor, height: int, width: int) -> Tensor:
        """Cut and flip.

        Args:
            padded: all images (n, H + 2p, W + 2p, C), uint8.
            chosen: indices of the images of this batch (B,).
            height: H.
            width: W.

        Returns:
            Pixels (B, H, W, C).
        """
        steps = torch.arange(width, device=padded.device)
        columns = torch.where(self.flipped[:, None], width - 1 - steps, steps)
        columns = columns + self.left[:, None]  # (B, W)
        rows = self.top[:, None] + torch.arange(height, device=padded.device)  # (B, H)
        rows = rows + chosen[:, None] * padded.shape[1]  # of all images, end to end
        places = rows[:, :, None] * padded.shape[2] + columns[:, None, :]  # (B, H, W)
        pixels = padded.flatten(0, 2).index_select(0, places.flatten())
        return pixels.view(*places.shape, -1)
