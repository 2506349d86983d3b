"""The examples of one client, or the test set, as tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


class Placed(Protocol):
    """Raw examples on a device, and the inputs that they give."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw examples."""

    def batches(
        self, order: Tensor, batch_size: int, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield inputs in the order given; a generator draws the augmentation of all examples."""


class InputTransform(Protocol):
    """How raw examples come to lie on a device and become inputs."""

    @property
    def augments(self) -> bool:
        """Whether training inputs differ from the examples by chance."""

    def place(self, raw: NDArray[Any], device: torch.device, *, channels_last: bool) -> Placed:
        """Copy raw examples (n, ...) to the device; inputs that are images come channels last."""

    def module(self) -> nn.Module:
        """Return the layer from raw examples (B, ...) to inputs, without augmentation."""


class TensorData:
    """Raw examples and labels on a device, which become inputs batch by batch.

    Args:
        examples: (n, C, H, W), uint8, or (n, T) tokens.
        labels: (n,), int64.
        num_classes: of the task, held here or not.
        transform: how examples become inputs: of images augmentation and normalisation.
        device: where the examples stay and the batches come from.
        channels_last: give batches of images in that memory format.
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
        if drop_last and len(self) >= batch_size:
            order = order[: len(self) // batch_size * batch_size]
        order = order.to(self.device)
        inputs = self._placed.batches(order, batch_size, generator if train else None)
        for chosen, batch in zip(torch.split(order, batch_size), inputs, strict=True):
            yield batch, self.labels[chosen]


class ConditionedData(TensorData):
    """The same, its inputs (B, d + C): an example's values, and behind them its class, one-hot.

    For models that are told the class and make the example (tasks/models/cvae.py).
    """

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        train: bool,
        drop_last: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass of (inputs, labels), as :class:`TensorData` does."""
        for examples, labels in super().batches(
            batch_size, generator=generator, train=train, drop_last=drop_last
        ):
            classes = F.one_hot(labels, self.num_classes).to(examples)
            yield torch.cat([examples.flatten(1), classes], dim=1), labels
