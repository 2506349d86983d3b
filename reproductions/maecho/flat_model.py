"""Models as one row of numbers, and test batches that are kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhet.strategies.base import Tensors


def flat(tensors: Tensors) -> Tensor:
    """Return all tensors in one row (d,)."""
    return torch.cat([value.flatten() for value in tensors.values()]).double()


def unflat(row: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a row (d,), with the names and shapes of ``like``."""
    parts = torch.split(row, [value.numel() for value in like.values()])
    return {
        name: part.view_as(value) for (name, value), part in zip(like.items(), parts, strict=True)
    }


class Batches:
    """Batches in memory, as :func:`fedhet.tasks.evaluation.evaluate_model` takes them."""

    def __init__(self, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.kept = kept

    def __len__(self) -> int:
        """Return the number of examples."""
        return sum(len(labels) for _, labels in self.kept)

    def batches(self, *_: Any, **__: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches."""
        return iter(self.kept)
