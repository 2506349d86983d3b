"""Models as one row of numbers, and their loss and accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.base import Tensors
from tasks.evaluation import Loss, evaluate_model

Batches = Sequence[tuple[Tensor, Tensor]]


def flat(tensors: Tensors) -> Tensor:
    """Return all tensors in one row (d,)."""
    return torch.cat([value.flatten() for value in tensors.values()]).double()


class Measured:
    """Loss and accuracy of models that are given as one row of numbers.

    Args:
        model: the network.
        like: the tensors in the row, in their order.
        batches: of the test set.
        loss: of the task.
    """

    def __init__(self, model: nn.Module, like: Tensors, batches: Batches, loss: Loss) -> None:
        self.model, self.like, self.batches, self._loss = model, like, batches, loss

    def score(self, row: Tensor) -> tuple[float, float | None]:
        """Return loss and accuracy on all examples."""
        return self._evaluate(row, self.batches)

    def loss(self, row: Tensor, examples: int) -> float:
        """Return the loss on the first examples."""
        return self._evaluate(row, self._first(examples))[0]

    def count(self, examples: int) -> int:
        """Return the number of examples that ``loss`` takes: whole batches."""
        return len(_Examples(self._first(examples)))

    def _first(self, examples: int) -> Batches:
        return self.batches[: max(1, examples // len(self.batches[0][1]))]

    @torch.no_grad()
    def _evaluate(self, row: Tensor, batches: Batches) -> tuple[float, float | None]:
        state, start = self.model.state_dict(), 0
        for name, value in self.like.items():
            state[name].copy_(row[start : start + value.numel()].view_as(value))
            start += value.numel()
        return evaluate_model(self.model, _Examples(batches), self._loss)


class _Examples:
    """Batches in memory, as :func:`evaluate_model` takes them."""

    def __init__(self, kept: Batches) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return sum(len(labels) for _, labels in self.kept)

    def batches(self, *_: Any, **__: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.kept)
