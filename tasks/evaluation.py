"""Evaluation of a model on one set of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.tasks.examples import IGNORED
from fedhet.tasks.metrics import MetricSet

_BATCH = 500  # examples at once

Loss = Callable[[Tensor, Tensor], Tensor]


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


def classifies(model: nn.Module) -> bool:
    """Return whether the model's outputs are logits of classes."""
    return bool(getattr(model, "classifies", True))


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    data: Batched,
    loss: Loss,
    batch_size: int = _BATCH,
    metrics: MetricSet | None = None,
) -> tuple[float, float | None]:
    """Return (mean loss, accuracy in [0, 1]) of a model in eval mode over all of ``data``.

    A model that does not classify has no accuracy (None). ``metrics`` gets the same outputs. For
    masks, the loss is the mean over the pixels that are not IGNORED.
    """
    losses, hits, counts = [], [], []
    for batch_loss, right, labels in _scored(model, data, loss, batch_size, metrics=metrics):
        counts.append(_counted(labels))
        losses.append(batch_loss * counts[-1])
        hits.append(right.sum())
    mean_loss = float(torch.stack(losses).sum()) / max(float(sum(counts)), 1.0)
    return mean_loss, float(torch.stack(hits).sum()) / len(data) if classifies(model) else None


@torch.no_grad()
def class_accuracies(
    model: nn.Module,
    data: Batched,
    loss: Loss,
    num_classes: int,
    batch_size: int = _BATCH,
    generator: torch.Generator | None = None,
    metrics: MetricSet | None = None,
) -> tuple[float, float, Tensor]:
    """Return mean loss, accuracy, and the accuracy on each class (C,), NaN without an example.

    Examples with several labels each (n, T) belong to no class. With a generator the examples are
    augmented as for training. ``metrics`` receives the same outputs.
    """
    losses, counted, all_right, right, counts = [], [], [], [], []
    for batch_loss, hits, labels in _scored(model, data, loss, batch_size, generator, metrics):
        counted.append(_counted(labels))
        losses.append(batch_loss * counted[-1])
        all_right.append(hits.sum())
        classes, found = (labels, hits) if labels.dim() == 1 else (labels[:0, 0], hits[:0])
        right.append(torch.bincount(classes[found > 0], minlength=num_classes))
        counts.append(torch.bincount(classes, minlength=num_classes))
    by_class = torch.stack(right).sum(0).cpu() / torch.stack(counts).sum(0).cpu()
    mean_loss = float(torch.stack(losses).sum()) / max(float(sum(counted)), 1.0)
    return mean_loss, float(torch.stack(all_right).sum()) / len(data), by_class


@torch.no_grad()
def logits_of(model: nn.Module, data: Batched) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return logits (n, C) of a model in eval mode and labels (n,) of all examples."""
    model.eval()
    logits, labels = [], []
    for inputs, batch_labels in data.batches(_BATCH, generator=None, train=False):
        logits.append(model(inputs)[1].double().cpu())
        labels.append(batch_labels.cpu())
    return torch.cat(logits).numpy(), torch.cat(labels).numpy()


def _scored(
    model: nn.Module,
    data: Batched,
    loss: Loss,
    batch_size: int,
    generator: torch.Generator | None = None,
    metrics: MetricSet | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each batch's mean loss, which examples are right (B,), and the labels (B, ...).

    If the model does not classify, no example is right. If an example has several labels, such as
    tokens, a share of it is right.
    """
    model.eval()
    decides = classifies(model)
    if metrics is not None:
        metrics.reset()
    train = generator is not None
    for inputs, labels in data.batches(batch_size, generator=generator, train=train):
        _, logits = model(inputs)
        if metrics is not None:
            metrics.update(logits, labels)
        mean = loss(logits, labels)
        if mean.dtype == torch.float16:  # its sum over some 20,000 labels would be Inf
            mean = mean.float()
        yield mean, _right(logits, labels) if decides else torch.zeros(len(labels)), labels


def _counted(labels: Tensor) -> int | Tensor:
    """Return the number of labels that a batch's mean loss averages."""
    if labels.dim() == 1 or labels.is_floating_point():
        return len(labels)
    return (labels != IGNORED).sum()


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which labels (B,) have the largest logit; for labels (B, ...) the share (B,)."""
    guesses = logits.argmax(dim=1)
    if guesses.shape != labels.shape:
        raise ConfigError(
            f"the logits have the shape {tuple(logits.shape)} and the labels "
            f"{tuple(labels.shape)}: for task.kind=classification they must be (B, C) and (B,). "
            "If an example may have several classes, use task.kind=regression with a task.loss"
        )
    right = guesses == labels
    return right if right.dim() == 1 else right.flatten(1).float().mean(dim=1)
