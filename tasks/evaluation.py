"""Evaluation of a model on one set of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class Batched(Protocol):
    """Examples that come in batches of (inputs, labels)."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        train: bool,
        drop_last: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass over the examples."""


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    data: Batched,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch_size: int = 500,
) -> tuple[float, float]:
    """Return (mean loss, accuracy in [0, 1]) of a model in eval mode over all of ``data``."""
    model.eval()
    device = next(model.parameters()).device
    total_loss, correct = torch.zeros((), device=device), torch.zeros((), device=device)
    for inputs, labels in data.batches(batch_size, generator=None, train=False):
        _, logits = model(inputs)
        total_loss += loss(logits, labels) * len(labels)
        correct += (logits.argmax(dim=1) == labels).sum()
    return float(total_loss) / len(data), float(correct) / len(data)
