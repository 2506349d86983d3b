"""Local optimizers: how a client takes a step. Each round starts a fresh one, without state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedhet.common.errors import require_range
from fedhet.strategies.base import Batch, Tensors
from fedhet.strategies.components.tensor_selection import TensorSelector, as_selector


def reach(num_steps: int, momentum: float) -> float:
    """Return how far K gradients of 1 move a tensor, in step sizes.

    With momentum m the j-th moves it by 1 + m + ... + m^(K - j); without, K in all.
    """
    if momentum == 1.0:
        return num_steps * (num_steps + 1) / 2
    rest = momentum * (1.0 - momentum**num_steps) / (1.0 - momentum)
    return (num_steps - rest) / (1.0 - momentum)


class _OneGradient:
    """An optimizer whose step is one gradient and one move along it."""

    def move(self) -> None:
        """Move the params along their gradients."""
        raise NotImplementedError

    def step(
        self,
        next_batch: Callable[[], Batch],
        backward: Callable[[Batch], Tensor],
        correct: Callable[[], None],
    ) -> Tensor:
        """Take one step and return its loss."""
        loss = backward(next_batch())
        correct()
        self.move()
        return loss


class SGD(_OneGradient):
    """SGD with momentum and weight decay.

    Args:
        momentum: heavy-ball coefficient in [0, 1].
        weight_decay: L2 coefficient, added to the gradient at the step (after clipping).
        momentum_layers: the tensors that momentum acts on; the others take plain steps.
    """

    def __init__(
        self,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        momentum_layers: TensorSelector | str = "all",
    ) -> None:
        self.momentum = require_range("local.momentum", momentum, high=1.0)
        self.weight_decay = require_range("local.weight_decay", weight_decay)
        self.momentum_layers = as_selector(momentum_layers, "local.momentum_layers")

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        self.lr = lr
        moved = set(self.stateful(list(params)))
        self.plain = [param for name, param in params.items() if name not in moved]
        self.moving = [param for name, param in params.items() if name in moved]
        self.velocity: dict[Tensor, Tensor] = {}

    def move(self) -> None:
        """Take a step of SGD; a param without a gradient stays where it is."""
        # PyTorch's optimizer imports the whole compiler first (1.3 s a process).
        for params, momentum in ((self.plain, 0.0), (self.moving, self.momentum)):
            if moved := [param for param in params if param.grad is not None]:
                self._sgd(moved, momentum)

    @torch.no_grad()
    def _sgd(self, params: list[Tensor], momentum: float) -> None:
        steps = [param.grad for param in params if param.grad is not None]
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, params, alpha=self.weight_decay))
        if momentum:
            steps = [self._moved(*pair, momentum) for pair in zip(params, steps, strict=True)]
        torch._foreach_add_(params, steps, alpha=-self.lr)

    def _moved(self, param: Tensor, step: Tensor, momentum: float) -> Tensor:
        """Return a param's velocity after this step; its first one is the step."""
        if param not in self.velocity:
            self.velocity[param] = step.clone()
        else:
            self.velocity[param].mul_(momentum).add_(step)
        return self.velocity[param]

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return those of the named tensors whose step is not plain SGD."""
        return self.momentum_layers.select(names) if self.momentum else []


class Adam(_OneGradient):
    """Adam with PyTorch's defaults; FedDW's local optimizer (lr 1e-3)."""

    momentum = None

    def __init__(
        self, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        require_range("local.weight_decay", weight_decay)
        self.make = partial(
            torch.optim.Adam, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay
        )

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        self.optimizer = self.make(list(params.values()), lr=lr)

    def move(self) -> None:
        """Take a step of Adam."""
        self.optimizer.step()

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return all names: Adam rescales every step."""
        return list(names)
