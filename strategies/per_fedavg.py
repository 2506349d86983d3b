"""Per-FedAvg: personalized federated learning, a meta-learning approach.

Fallah, Mokhtari, Ozdaglar. NeurIPS 2020. https://arxiv.org/abs/2002.07948

The global model is trained to be good after one gradient step at a client: its objective F is its
loss f after that step. Each gradient has its own mini-batch, D, D' and D'' (Algorithm 1):

    F(w) = f(w - alpha grad f(w))
    w'   = w - alpha grad f(w; D)
    w   <- w - beta g,     g = (I - alpha hess f(w; D'')) grad f(w'; D')

``order=first`` has g = grad f(w'; D'), of two mini-batches a step; ``order=hessian_free`` takes
three, and two more gradients for the product with the Hessian:

    hess f(w; D'') v  ~  (grad f(w + delta v; D'') - grad f(w - delta v; D'')) / (2 delta)

beta is ``local.lr``. alpha = 0 is FedAvg that trains on every second mini-batch. f has the
penalties of other methods; their corrections, and clipping, act on g. The step along g is plain
SGD, so SCAFFOLD's option II may take the mean g from the displacement.

num_steps counts moves: an epoch has half or a third of FedAvg's. Mini-batches left over at the end
of training, or of a phase, are not used. A client with too few for one step sends an error: raise
local.epochs, or lower local.batch_size.

The global model is evaluated without adaptation, as in FedDW's paper;
``evaluation.clients=true evaluation.finetune_epochs=1`` adds its accuracy after an epoch of plain
steps of size alpha at every client, as in F. If alpha is too large, f can grow while F
(``train_loss``) stays small.

FedDW's released code takes both gradients on the same mini-batch (``same_batch=true``), with alpha
.01 and beta .001, in a copy of the model that it throws away, BatchNorm's statistics included: its
ResNet's never move. Here they move in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative, Positive
from fedhet.strategies.base import Backward, Batch, Correct, NextBatch, Tensors
from fedhet.strategies.components.local_optimizers import SGD, optimizer_settings
from fedhet.strategies.method import Method

Order = Literal["first", "hessian_free"]
Grads = Sequence[Tensor | None]  # by param; None where a batch gives none


class PerFedAvgOptimizer(SGD):
    """Minimises the loss that remains after one gradient step; moves by plain SGD.

    Attributes:
        alpha, order, delta, same_batch: see :class:`PerFedAvg`.
    """

    section = "local.optimizers.per_fedavg"

    alpha: NotNegative
    order: Order = "first"
    delta: Positive = 0.001
    same_batch: bool = False

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size, beta."""
        super().start(params, lr)
        self.params = list(params.values())

    def step(self, next_batch: NextBatch, backward: Backward, correct: Correct) -> Tensor:
        """Take one step and return the loss of the adapted model, f(w'; D')."""
        first, second, third = self._draw(next_batch)  # may run out: before anything is changed
        start = [param.detach().clone() for param in self.params]
        grads, _ = self._grads(backward, first)
        self._place(_plus(start, grads, -self.alpha))
        grads, loss = self._grads(backward, second)
        if self.order == "hessian_free":
            product = self._hessian_product(start, grads, backward, third)
            grads = _plus(grads, product, -self.alpha)
        self._place(start)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        correct()
        self.move()
        return loss

    def for_finetuning(self, lr: float) -> tuple[SGD, float]:
        """Return the optimizer that adapts the model to a client, with its step size alpha."""
        return SGD(), self.alpha

    @property
    def batches_per_step(self) -> int:
        """How many batches a step draws."""
        return 1 if self.same_batch else 2 if self.order == "first" else 3

    def _draw(self, next_batch: NextBatch) -> tuple[Batch, Batch, Batch]:
        drawn = [next_batch() for _ in range(self.batches_per_step)]
        return drawn[0], drawn[min(1, len(drawn) - 1)], drawn[-1]

    def _grads(self, backward: Backward, batch: Batch) -> tuple[Grads, Tensor]:
        loss = backward(batch)
        return [param.grad for param in self.params], loss

    def _hessian_product(
        self, start: Sequence[Tensor], vector: Grads, backward: Backward, batch: Batch
    ) -> Grads:
        """Return hess f(start) vector, by central differences."""
        device = start[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._place(_plus(start, vector, self.delta))
            ahead, _ = self._grads(backward, batch)
        self._place(_plus(start, vector, -self.delta))  # with the same dropout
        behind, _ = self._grads(backward, batch)
        return [
            None if v is None or a is None or b is None else (a - b) / (2 * self.delta)
            for v, a, b in zip(vector, ahead, behind, strict=True)
        ]

    @torch.no_grad()
    def _place(self, values: Grads) -> None:
        for param, value in zip(self.params, values, strict=True):
            if value is not None:
                param.copy_(value)


def _plus(values: Grads, direction: Grads, factor: float) -> list[Tensor | None]:
    """Return values + factor * direction; a value stays where there is no direction."""
    return [
        value if value is None or step is None else value + factor * step
        for value, step in zip(values, direction, strict=True)
    ]


class PerFedAvg(Method):
    """Per-FedAvg (Fallah et al. 2020): personalised; trains a global model that is good after one
    gradient step at a client (MAML).

    ``local.lr`` is beta, the size of the move after that step.
    """

    name = "per_fedavg"
    replaces = frozenset({"optimizer"})
    settings = optimizer_settings(
        "per_fedavg", PerFedAvgOptimizer, "alpha", "order", "delta", "same_batch", plain=True
    )
    requires = MappingProxyType({"local.optimizer": "per_fedavg"})

    alpha: NotNegative = 0.01
    """size of the adapting gradient step; local.lr is beta, the size of the move after it"""
    order: Order = "first"
    """first (no Hessian, 2 mini-batches a step) | hessian_free (3 mini-batches, 2 more
    gradients)"""
    delta: Positive = 0.001
    """hessian_free: how far apart, in gradients, its two gradients are taken"""
    same_batch: bool = False
    """true: all gradients of a step on one mini-batch, as FedDW's released code has it"""
