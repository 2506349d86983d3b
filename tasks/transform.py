"""Transforms of raw examples on a device into inputs: images are augmented and normalised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

_AT_ONCE = 1 << 18  # bytes of inputs to make together: small batches mostly cost calls


@dataclass(frozen=True)
class Transform:
    """Augmentation and normalisation of images, in the order flip, crop, normalise.

    Attributes:
        mean: mean per channel, for pixels in [0, 1].
        std: standard deviation per channel, for pixels in [0, 1].
        flip: mirror each training image left to right with probability 1/2.
        crop_padding: pixels around a training image before a random crop; 0: no crop.
        crop_padding_mode: constant (black) | reflect (the image mirrored at its edge).
        crop_probability: the probability that a training image is cropped.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop_padding: int = 0
    crop_padding_mode: str = "constant"
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

    def place(
        self, raw: NDArray[np.uint8], device: torch.device, *, channels_last: bool
    ) -> PlacedImages:
        """Copy pixels (n, C, H, W) to the device."""
        return PlacedImages(torch.from_numpy(np.array(raw)).to(device), self, channels_last)

    def module(self) -> Normalise:
        """Return the normalisation as a layer."""
        return Normalise(self)


class Normalise(nn.Module):
    """Layer that normalises pixels 0..255 (B, C, H, W) of any type, without augmentation."""

    scale: Tensor
    shift: Tensor

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        scale, shift = transform.constants(torch.device("cpu"))
        self.register_buffer("scale", scale.view(-1, 1, 1))
        self.register_buffer("shift", shift.view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return inputs (B, C, H, W), float32."""
        return pixels.float() * self.scale + self.shift


@dataclass(frozen=True)
class Augmentation:
    """Random flips and crops for the images of one pass, drawn at once.

    Attributes:
        flipped: (n,) bool.
        top: (n,) first row of the crop, in the padded image.
        left: (n,) first column of the crop, in the padded image.
    """

    flipped: Tensor
    top: Tensor
    left: Tensor

    @classmethod
    def draw(cls, transform: Transform, size: int, generator: torch.Generator) -> Augmentation:
        """Draw flips and crops for ``size`` images."""
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

    def batches(self, batch_size: int, device: torch.device) -> Iterator[Augmentation]:
        """Yield the choices batch by batch, on the device."""
        drawn = (values.to(device) for values in (self.flipped, self.top, self.left))
        for parts in zip(*(torch.split(values, batch_size) for values in drawn), strict=True):
            yield Augmentation(*parts)

    def apply(self, padded: Tensor, chosen: Tensor, height: int, width: int) -> Tensor:
        """Crop and flip the chosen images.

        Args:
            padded: all images (n, H + 2p, W + 2p, C), uint8.
            chosen: indices of the images of this batch (B,).
            height: H of the returned pixels (B, H, W, C).
            width: W.
        """
        steps = torch.arange(width, device=padded.device)
        columns = torch.where(self.flipped[:, None], width - 1 - steps, steps)
        columns = columns + self.left[:, None]  # (B, W)
        rows = self.top[:, None] + torch.arange(height, device=padded.device)  # (B, H)
        rows = rows + chosen[:, None] * padded.shape[1]  # rows of all images below each other
        places = rows[:, :, None] * padded.shape[2] + columns[:, None, :]  # (B, H, W)
        pixels = padded.flatten(0, 2).index_select(0, places.flatten())
        return pixels.view(*places.shape, -1)


class PlacedImages:
    """Raw pixels (n, C, H, W), uint8, on a device, turned into inputs."""

    def __init__(self, pixels: Tensor, transform: Transform, channels_last: bool) -> None:
        self._transform = transform
        self._channels_last = channels_last
        # Augmentation moves single pixels, which is fast only with channels last.
        self._by_pixel = channels_last or transform.augments
        self._pixels = pixels.permute(0, 2, 3, 1).contiguous() if self._by_pixel else pixels
        self._padded: Tensor | None = None
        self._scale, self._shift = self._constants()

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels."""
        return self._pixels.numel() * self._pixels.element_size()

    def batches(
        self, order: Tensor, batch_size: int, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield normalised inputs (B, C, H, W), augmented if a generator is given."""
        if generator is None or not self._transform.augments:
            size = batch_size * 4 * self._pixels[:1].numel()
            several = batch_size * max(1, _AT_ONCE // max(1, size))
            for chosen in torch.split(order, several):
                yield from torch.split(self._finish(self._pixels[chosen]), batch_size)
            return
        batches = torch.split(order, batch_size)
        drawn = Augmentation.draw(self._transform, len(self._pixels), generator)
        parts = drawn.batches(batch_size, self._pixels.device)
        # The order may leave out the last, smaller batch, for which choices were drawn.
        for chosen, part in zip(batches, parts, strict=False):
            yield self._finish(part.apply(self.padded(), chosen, *self._pixels.shape[1:3]))

    def padded(self) -> Tensor:
        """Return all images with a border, (n, H + 2p, W + 2p, C)."""
        if self._padded is None:
            border = self._transform.crop_padding
            if self._transform.crop_padding_mode == "reflect":  # F.pad reflects no uint8
                rows, columns = (reflected(side, border) for side in self._pixels.shape[1:3])
                self._padded = self._pixels[:, rows][:, :, columns]
            else:
                self._padded = F.pad(self._pixels, (0, 0, border, border, border, border))
        return self._padded

    def _constants(self) -> tuple[Tensor, Tensor]:
        scale, shift = self._transform.constants(self._pixels.device)
        if self._channels_last:  # (W, C): an innermost loop over three channels is slow
            width = self._pixels.shape[2]
            return scale.repeat(width, 1), shift.repeat(width, 1)
        return scale.view(-1, 1, 1), shift.view(-1, 1, 1)

    def _finish(self, pixels: Tensor) -> Tensor:
        """Return normalised inputs (B, C, H, W)."""
        if self._by_pixel and not self._channels_last:
            pixels = pixels.permute(0, 3, 1, 2).contiguous()
        inputs = pixels.float().mul_(self._scale).add_(self._shift)
        return inputs.permute(0, 3, 1, 2) if self._channels_last else inputs


def reflected(side: int, border: int) -> Tensor:
    """Return the places (side + 2 border,) in a row that is mirrored at its ends, once each."""
    steps = torch.arange(-border, side + border).abs()
    return (side - 1) - ((side - 1) - steps).abs()


@dataclass(frozen=True)
class NoTransform:
    """Leaves tokens, and what a user's function has made, unchanged."""

    augments = False

    def place(
        self, raw: NDArray[np.signedinteger], device: torch.device, *, channels_last: bool
    ) -> PlacedTokens:
        """Copy tokens (n, T) to the device."""
        return PlacedTokens(torch.from_numpy(np.array(raw)).to(device))

    def module(self) -> nn.Module:
        """Return the identity: tokens are the inputs."""
        return nn.Identity()


@dataclass(frozen=True)
class PlacedTokens:
    """Tokens (n, T) of any integer type on a device, turned into inputs."""

    tokens: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens."""
        return self.tokens.numel() * self.tokens.element_size()

    def batches(
        self, order: Tensor, batch_size: int, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield tokens (B, T), int64."""
        for chosen in torch.split(order, batch_size):
            yield self.tokens[chosen].long()


InputTransform = Transform | NoTransform
