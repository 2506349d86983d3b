"""Models given as one row of numbers, and how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.base import Tensors
from tasks.evaluation import Loss, evaluate_model


def flat(tensors: Tensors) -> Tensor:
    """Return all tensors in one row (d,)."""
    return torch.cat([value.flatten() for value in tensors.values()]).double()


class Measured:
    """Loss and accuracy of models given as one row of numbers.

    Args:
        model: the network.
        like: the tensors that the row holds, in their order.
        batches: of the test set.
        loss: of the task.
    """

    def __init__(
        self, model: nn.Module, like: Tensors, batches: Sequence[tuple[Tensor, Tensor]], loss: Loss
    ) -> None:
        self.model, self.like, self.batches, self._loss = model, like, batches, loss

    def score(self, row: Tensor) -> tuple[float, float | None]:
        """Return loss and accuracy on all."""
        return self._evaluate(row, len(self.batches))

    def loss(self, row: Tensor, examples: int) -> float:
        """Return the loss on the first examples."""
        return self._evaluate(row, self._enough(examples))[0]

    def count(self, examples: int) -> int:
        """Return how many examples ``loss`` takes: whole batches."""
        return len(_Batches(self.batches[: self._enough(examples)]))

    def _enough(self, examples: int) -> int:
        return max(1, examples // len(self.batches[0][1]))

    @torch.no_grad()
    def _evaluate(self, row: Tensor, batches: int) -> tuple[float, float | None]:
        state, start = self.model.state_dict(), 0
        for name, value in self.like.items():
            state[name].copy_(row[start : start + value.numel()].view_as(value))
            start += value.numel()
        return evaluate_model(self.model, _Batches(self.batches[:batches]), self._loss)


class _Batches:
    """Batches that are there already, as :func:`evaluate_model` wants them."""

    def __init__(self, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return sum(len(labels) for _, labels in self.kept)

    def batches(self, *_: Any, **__: Any) -> Any:
        return iter(self.kept)
