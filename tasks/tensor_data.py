"""The examples of one client, or the test set, as tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.transform import Augmentation, Transform


class TensorData:
    """Raw pixels and labels on a device, transformed batch by batch.

    Args:
        images: (n, C, H, W), uint8.
        labels: (n,), int64.
        num_classes: of the task, held here or not.
        transform: augmentation and normalisation.
        device: where the examples stay and the batches come from.
        channels_last: give batches in that memory format.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        num_classes: int,
        transform: Transform,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.num_classes = num_classes
        self.transform = transform
        self.device = torch.device(device)
        self.channels_last = channels_last
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64)).to(self.device)
        # Pixels that are moved one by one, or wanted channels last, lie channels last.
        pixels = torch.from_numpy(np.array(images)).to(self.device)
        self._by_pixel = channels_last or transform.augments
        self._pixels = pixels.permute(0, 2, 3, 1).contiguous() if self._by_pixel else pixels
        self._padded: Tensor | None = None
        self._scale, self._shift = self._constants()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels."""
        return self._pixels.numel() * self._pixels.element_size()

    def class_counts(self) -> list[int]:
        """Return the number of examples of each class."""
        return torch.bincount(self.labels, minlength=self.num_classes).tolist()

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        train: bool,
        drop_last: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass of (inputs, labels).

        Args:
            batch_size: examples a batch.
            generator: shuffles the pass and draws its augmentation; None: in order, and as for a
                test, since augmentation is drawn from nothing else.
            train: augment, where the task does.
            drop_last: leave out a last, smaller batch unless it is the only one.
        """
        if len(self) == 0:
            return
        order = torch.arange(len(self))
        if generator is not None:
            order = torch.randperm(len(self), generator=generator, device=generator.device)
        augmentation = None
        if train and generator is not None and self.transform.augments:
            augmentation = Augmentation.draw(self.transform, len(self), generator)
        if drop_last and len(self) >= batch_size:
            order = order[: len(self) // batch_size * batch_size]
        order = order.to(self.device)
        if augmentation is None:
            for chosen in torch.split(order, batch_size):
                yield self._finish(self._pixels[chosen]), self.labels[chosen]
            return
        parts = augmentation.to(self.device).split(batch_size)
        for chosen, part in zip(torch.split(order, batch_size), parts, strict=False):
            pixels = part.apply(self._padding(), chosen, *self._pixels.shape[1:3])
            yield self._finish(pixels), self.labels[chosen]

    def _constants(self) -> tuple[Tensor, Tensor]:
        scale, shift = self.transform.constants(self.device)
        if self.channels_last:  # (W, C), since an innermost loop over three channels is slow
            width = self._pixels.shape[2]
            return scale.repeat(width, 1), shift.repeat(width, 1)
        return scale.view(-1, 1, 1), shift.view(-1, 1, 1)

    def _finish(self, pixels: Tensor) -> Tensor:
        """Return normalised inputs (B, C, H, W)."""
        if self._by_pixel and not self.channels_last:
            pixels = pixels.permute(0, 3, 1, 2).contiguous()
        inputs = pixels.float().mul_(self._scale).add_(self._shift)
        return inputs.permute(0, 3, 1, 2) if self.channels_last else inputs

    def _padding(self) -> Tensor:
        if self._padded is None:
            border = self.transform.crop_padding
            self._padded = F.pad(self._pixels, (0, 0, border, border, border, border))
        return self._padded
