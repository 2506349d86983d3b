"""pFedMe: personalized federated learning with Moreau envelopes.

Dinh, Tran, Nguyen. NeurIPS 2020. https://arxiv.org/abs/2006.08848

A client's objective is the Moreau envelope of its loss f: what is left of it at theta, the best
model near w (eq. 2, 3). A step on w, with one mini-batch (Algorithm 1):

    F(w)   = min over theta of f(theta) + (lambda / 2) ||theta - w||^2
    theta <- theta - lr (grad f(theta) + lambda (theta - w))          ``steps`` times, K
    w     <- w - eta_l lambda (w - theta)

eta_l is ``local.lr``, beta of the paper's server ``server.lr``. theta begins as x in every round
and goes on from step to step, as in the authors' code; that of a round's last step is the client's
own model, which is evaluated (``evaluation.model=clients``; ``both`` adds the global one), with
y_i's BatchNorm statistics. Nothing is kept from round to round. lambda = 0 does not move w.

lambda (w - theta) takes the place of grad f(w): it goes through the local optimizer, so that
momentum, weight decay, clipping and other methods' penalties act on w alone. A step costs K + 1
gradients. The authors' code adds .001 theta to the inner gradient, and lets all clients train,
those too that are not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError, require_range, require_whole
from fedhet.strategies.base import ClientSide, LocalContext, LocalOptimizer, Step, Tensors
from fedhet.strategies.components.second_model import slopes_at
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fedsam import SAM
from fedhet.strategies.per_fedavg import PerFedAvgOptimizer
from fedhet.strategies.round.arguments import Slots


class PFedMeClient(ClientSide):
    """Takes steps down the Moreau envelope of the task's loss.

    Args:
        coefficient: lambda, how strongly theta is drawn to w.
        steps: K, gradient steps on theta for each on w.
        lr: their size; theta does not settle from lr (lambda + the loss's curvature) = 2 on.
    """

    def __init__(self, coefficient: float = 15.0, steps: int = 5, lr: float = 0.05) -> None:
        self.coefficient = require_range("strategy.pfedme.coefficient", coefficient)
        self.steps = require_whole("strategy.pfedme.steps", steps, low=1)
        self.lr = require_range("strategy.pfedme.lr", lr, open_low=True)

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse optimizers that look ahead along f's gradient, which w does not have here."""
        sam = isinstance(optimizer, SAM) and optimizer.rho > 0.0
        if sam or isinstance(optimizer, PerFedAvgOptimizer):
            raise ConfigError(
                f"strategy=pfedme: w has no gradient of the task's loss (theta has), and "
                f"{type(optimizer).__name__} looks ahead along it first: set local.optimizer=sgd"
            )

    def begin(self, context: LocalContext) -> None:
        """Start theta where w starts."""
        self.theta: Tensors = {
            name: param.detach().clone()
            for name, param in context.params.items()
            if param.requires_grad
        }

    def penalty(self, step: Step) -> Tensor:
        """Note the mini-batch; return 0, with the slope that takes f out of w's gradient."""
        if step.context.first_pass:
            self.step = step
        loss = step.context.loss(step.logits, step.labels)
        return loss.detach() - loss

    def correct(self, grads: Tensors, context: LocalContext) -> None:
        """Move theta, and add lambda (w - theta) to w's gradient."""
        w = context.params
        buffers = {name: value.clone() for name, value in context.model.named_buffers()}
        for _ in range(self.steps):
            slopes = slopes_at({**buffers, **self.theta}, self.step)
            with torch.no_grad():
                self.theta = {
                    name: value - self.lr * (slopes[name] + self.coefficient * (value - w[name]))
                    for name, value in self.theta.items()
                }
        with torch.no_grad():
            for name, value in self.theta.items():
                grads[name].add_(self.coefficient * (w[name] - value))

    def own_model(self, context: LocalContext) -> Tensors:
        """Return theta after the last step."""
        return self.theta


class PFedMe(FederatedStrategy):
    """FedAvg's server with :class:`PFedMeClient` at the clients."""

    def __init__(
        self, coefficient: float = 15.0, steps: int = 5, lr: float = 0.05, **slots: Unpack[Slots]
    ) -> None:
        super().__init__(client_sides={"pfedme": PFedMeClient(coefficient, steps, lr)}, **slots)
