"""Local optimizers: how a client takes a step. Each round starts a fresh one, without state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedhet.common.configured import Option, Refers
from fedhet.common.kinds import NotNegative, Positive, Says, Selector, Share, ShareBelowOne
from fedhet.strategies.base import Backward, Correct, LocalOptimizer, NextBatch, Tensors
from fedhet.strategies.components.tensor_selection import TensorSelector

Betas = Annotated[
    Sequence[ShareBelowOne],
    Field(min_length=2, max_length=2),
    Says("a list of two numbers in [0, 1)"),
]


def reach(num_steps: int, momentum: float) -> float:
    """Return how far K gradients of 1 move a tensor, in step sizes.

    With momentum m the j-th moves it by 1 + m + ... + m^(K - j); without, K in all.
    """
    if momentum == 1.0:
        return num_steps * (num_steps + 1) / 2
    rest = momentum * (1.0 - momentum**num_steps) / (1.0 - momentum)
    return (num_steps - rest) / (1.0 - momentum)


class _OneGradient(Option, LocalOptimizer):
    """An optimizer whose step is one gradient and one move along it."""

    group = "local/optimizers"

    weight_decay: Annotated[NotNegative, Refers("${local.weight_decay}")] = 0.0
    """added to the gradient at the step, after clipping"""

    def move(self) -> None:
        """Move the params along their gradients."""
        raise NotImplementedError

    def step(self, next_batch: NextBatch, backward: Backward, correct: Correct) -> Tensor:
        """Take one step and return its loss."""
        loss = backward(next_batch())
        correct()
        self.move()
        return loss


class SGD(_OneGradient):
    """SGD with momentum and weight decay."""

    option = "sgd"
    section = "local.optimizers.sgd"

    momentum: Annotated[Share, Refers("${local.momentum}")] = 0.0
    """heavy-ball coefficient"""
    momentum_layers: Annotated[Selector, Refers("${local.momentum_layers}")] = "all"
    """the tensors that momentum acts on; the others take plain steps"""

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
        if not self.momentum:
            return []
        return TensorSelector(self.momentum_layers, "local.momentum_layers").select(names)


def optimizer_settings(name: str, kind: type, *own: str, plain: bool = False) -> Mapping[str, Any]:
    """Return the settings of a recipe that make clients step by another kind of :class:`SGD`.

    Args:
        name: of the optimizer, and of the node below ``strategy`` that has its parameters.
        kind: its class.
        own: the parameters that it has from there; SGD's are those of ``local``.
        plain: its steps are plain SGD, whatever ``local`` has.
    """
    ours = () if plain else ("momentum", "weight_decay", "momentum_layers")
    sgd = {key: f"${{local.{key}}}" for key in ours}
    given = {key: f"${{strategy.{name}.{key}}}" for key in own}
    node = {"_target_": f"{kind.__module__}.{kind.__qualname__}", **given, **sgd}
    return MappingProxyType({"local.optimizer": name, f"local.optimizers.{name}": node})


class Adam(_OneGradient):
    """Adam with PyTorch's defaults; FedDW's local optimizer (lr 1e-3)."""

    option = "adam"
    section = "local.optimizers.adam"
    momentum = None

    betas: Betas = (0.9, 0.999)
    """decays of the first and the second moment"""
    eps: Positive = 1e-8
    """added to the root of the second moment"""

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        first, second = self.betas
        self.optimizer = torch.optim.Adam(
            list(params.values()),
            lr=lr,
            betas=(first, second),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )

    def move(self) -> None:
        """Take a step of Adam."""
        self.optimizer.step()

    def stateful(self, names: Sequence[str]) -> list[str]:
        """Return all names: Adam rescales every step."""
        return list(names)
