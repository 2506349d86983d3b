"""Losses by name, and checks of the shapes of a task's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.common.errors import ConfigError, require_choice
from fedhet.tasks.examples import IGNORED
from fedhet.tasks.references import is_reference, load_reference, require_pair

Loss = Callable[[Tensor, Tensor], Tensor]
GAMMA = 2.0  # of the focal loss
BALANCED = "balanced"


def same_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs (B, 1) as (B,) if the targets are (B,); other shapes must be equal."""
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"the model's outputs have the shape {tuple(outputs.shape)} and the targets "
            f"{tuple(targets.shape)}: they must be the same, or (B, 1) and (B,)"
        )
    return outputs


def require_logits(outputs: Tensor, num_classes: int) -> None:
    """Require one logit per class: outputs (B, C), or (B, C, ...) for pixels or tokens.

    Raises:
        ConfigError: for another number, because then the largest logit may be no class.
    """
    shape = tuple(outputs.shape)
    if len(shape) < 2 or shape[1] != num_classes:
        raise ConfigError(
            f"the model's outputs have the shape {shape}, but the task has {num_classes} classes: "
            f"they must be logits (B, {num_classes}), or (B, {num_classes}, H, W) for masks. "
            f"Change the model (task.model_options.num_classes={num_classes}, if it takes "
            "that; a binary classifier has two logits) or task.num_classes; null takes the outputs "
            "of the module task.classifier"
        )


def _on_equal_shapes(function: Callable[..., Tensor]) -> Loss:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(same_shape(outputs, targets), targets.to(outputs.dtype))

    return loss


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, C, ...) and labels (B, ...)."""
    _require_places(logits, labels)
    return F.cross_entropy(logits, labels)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002), gamma = 2.

    An example counts (1 - p)^2 times its cross-entropy, p its label's probability.
    """
    _require_places(logits, labels)
    each = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** GAMMA * each).mean()


def weighted(loss: Loss, weights: Tensor) -> Loss:
    """Return one of fedhet's losses of a classification with a weight for each class (C,).

    The mean is over the sum of the examples' weights, as in PyTorch; 0 if all weights are.
    """

    def weighted_loss(logits: Tensor, labels: Tensor) -> Tensor:
        _require_places(logits, labels)
        known = weights.to(logits.device, logits.dtype)[labels]
        each = F.cross_entropy(logits, labels, reduction="none")
        if loss is focal:
            each = (1 - torch.exp(-each)) ** GAMMA * each
        return (known * each).sum() / known.sum().clamp_min(torch.finfo(known.dtype).tiny)

    return weighted_loss


def balanced(counts: Sequence[int]) -> Tensor:
    """Return the weights n / (C n_c) of scikit-learn's "balanced"; C counts present classes."""
    found = torch.tensor(counts, dtype=torch.float64)
    present = found > 0
    weights = found.sum() / (present.sum() * found.clamp_min(1))
    return torch.where(present, weights, 1.0).float()


def pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same for the pixels that are not IGNORED; 0 if all are."""
    _require_places(logits, labels)
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp_min(1)


def _require_places(logits: Tensor, labels: Tensor) -> None:
    batch, *places = logits.shape[:1] + logits.shape[2:]
    if logits.dim() < 2 or (batch, *places) != labels.shape:
        raise ConfigError(
            f"the model's outputs have the shape {tuple(logits.shape)} and the labels "
            f"{tuple(labels.shape)}: they must be logits (B, C) and labels (B,), or for masks "
            "(B, C, H, W) and (B, H, W)"
        )


# The losses of each kind by name, with the default first.
LOSSES: dict[str, dict[str, Loss]] = {
    # logits (B, C), labels (B,)
    "classification": {"cross_entropy": cross_entropy, "focal": focal},
    # outputs (B,), (B, 1) or (B, k), targets (B,) or (B, k)
    "regression": {
        "mse": _on_equal_shapes(F.mse_loss),
        "l1": _on_equal_shapes(F.l1_loss),
        "huber": _on_equal_shapes(F.huber_loss),
    },
    # logits (B, C, H, W), labels (B, H, W)
    "segmentation": {"cross_entropy": pixel_cross_entropy},
}
KINDS = tuple(LOSSES)


def loss_of(kind: str, name: str | None) -> Loss:
    """Return the loss (outputs, targets) -> mean loss, a scalar, that ``task.loss`` names.

    Args:
        kind: classification, regression or segmentation.
        name: one of the kind's losses, or ``package.module:function``; None: the kind's first.

    Raises:
        ConfigError: for a loss that the kind does not have.
    """
    options = LOSSES[require_choice("task.kind", kind, LOSSES)]
    if name is None:
        return next(iter(options.values()))
    if is_reference(name):
        found: Any = load_reference("task.loss", name)
        loss: Loss = found() if isinstance(found, type) else found  # a class of nn.Module
        require_pair(f"task.loss={name} must be a function", loss, "the mean loss, a scalar tensor")
        return loss
    require_choice("task.loss", name, options)
    return options[name]
