"""The examples of one client, or the test set, as tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedhet.tasks.transform import InputTransform


def order_of(
    size: int, batch_size: int, generator: torch.Generator | None, *, drop_last: bool
) -> Tensor:
    """Return the order of one pass over examples: a generator's permutation, or theirs.

    ``drop_last`` leaves out a last, smaller batch unless it is the only one.
    """
    order = torch.arange(size)
    if generator is not None:
        order = torch.randperm(size, generator=generator, device=generator.device)
    if drop_last and size >= batch_size:
        order = order[: size // batch_size * batch_size]
    return order


class TensorData:
    """Raw examples and labels on a device, turned into inputs batch by batch.

    Args:
        examples: (n, C, H, W), uint8, or (n, T) tokens.
        labels: (n,), int64.
        num_classes: C.
        transform: turns examples into inputs; augments and normalises images.
        device: the device of the examples and the batches.
        channels_last: yield batches of images in that memory format.
    """

    def __init__(
        self,
        examples: NDArray[Any],
        labels: NDArray[Any],
        *,
        num_classes: int,
        transform: InputTransform,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.num_classes = num_classes
        self.device = torch.device(device)
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64)).to(self.device)
        self._placed = transform.place(examples, self.device, channels_last=channels_last)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw examples."""
        return self._placed.num_bytes

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
            batch_size: examples per batch.
            generator: shuffles and augments; None: keep the order, do not augment.
            train: augment, if the task does.
            drop_last: leave out a last, smaller batch unless it is the only one.
        """
        if len(self) == 0:
            return
        order = order_of(len(self), batch_size, generator, drop_last=drop_last).to(self.device)
        inputs = self._placed.batches(order, batch_size, generator if train else None)
        yield from zip(inputs, torch.split(self.labels[order], batch_size), strict=True)


class ConditionedData(TensorData):
    """TensorData with inputs (B, d + C), an example's values and its one-hot class.

    For conditional generative models (tasks/models/cvae.py).
    """

    def batches(self, batch_size: int, **how: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass of (inputs, labels)."""
        for examples, labels in super().batches(batch_size, **how):
            classes = F.one_hot(labels, self.num_classes).to(examples)
            yield torch.cat([examples.flatten(1), classes], dim=1), labels
