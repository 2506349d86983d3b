"""Examples with some left out, such as a test set if the server trains on a part of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedhet.tasks.evaluation import Batched


class MaskedData:
    """The examples of ``data`` where ``kept`` (n,) is true, in their order.

    Batches with left-out examples are smaller. There is no shuffling and no augmentation.
    """

    def __init__(self, data: Batched, kept: Tensor) -> None:
        self._data, self._kept = data, kept.cpu()

    def __len__(self) -> int:
        """Return the number of examples that are kept."""
        return int(self._kept.sum())

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        train: bool,
        drop_last: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass over the examples that are kept."""
        if generator is not None or train or drop_last:
            raise ValueError("masked examples are read in their order, without augmentation")
        start = 0
        for inputs, labels in self._data.batches(batch_size, generator=None, train=False):
            kept = self._kept[start : start + len(labels)].to(labels.device)
            start += len(labels)
            if kept.any():
                yield inputs[kept], labels[kept]
