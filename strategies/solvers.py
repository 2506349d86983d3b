"""Local solvers: how a client takes a step. Fresh each round: no optimiser state survives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strategies.base import Batch, Tensors, require_range
from strategies.layers import LayerSelector, as_selector


class _OneGradient:
    """A solver whose step is one gradient and one step of a torch optimiser."""

    optimizer: torch.optim.Optimizer

    def step(
        self,
        next_batch: Callable[[], Batch],
        backward: Callable[[Batch], Tensor],
        correct: Callable[[], None],
    ) -> Tensor:
        """Take one step and return its loss."""
        loss = backward(next_batch())
        correct()
        self.optimizer.step()
        return loss


class SGD(_OneGradient):
    """SGD with momentum and weight decay.

    Args:
        momentum: heavy-ball coefficient in [0, 1).
        weight_decay: L2 coefficient, added to the gradient at the step (after clipping).
        momentum_layers: the tensors that momentum acts on; the others take plain steps. (FedPVR's
            released script uses .9 on the feature extractor and 0 on the corrected tensors.)
    """

    def __init__(
        self,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        momentum_layers: LayerSelector | str = "all",
    ) -> None:
        self.momentum = require_range("local.momentum", momentum, high=1.0)
        self.weight_decay = require_range("local.weight_decay", weight_decay)
        self.momentum_layers = as_selector(momentum_layers)

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        moved = set(self.stateful(list(params)))
        groups = [
            {"params": [p for n, p in params.items() if n in moved], "momentum": self.momentum},
            {"params": [p for n, p in params.items() if n not in moved], "momentum": 0.0},
        ]
        self.optimizer = torch.optim.SGD(
            [group for group in groups if group["params"]], lr=lr, weight_decay=self.weight_decay
        )

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return those of the named tensors whose step is not plain SGD."""
        return self.momentum_layers.select(names) if self.momentum else []


class Adam(_OneGradient):
    """Adam with PyTorch's defaults; FedDW's local optimiser (lr 1e-3)."""

    def __init__(
        self,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.betas = (betas[0], betas[1])
        self.eps = eps
        self.weight_decay = require_range("local.weight_decay", weight_decay)

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        self.optimizer = torch.optim.Adam(
            list(params.values()),
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return all names: Adam rescales every step."""
        return list(names)
