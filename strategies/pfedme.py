"""pFedMe: personalized federated learning with Moreau envelopes.

Dinh, Tran, Nguyen. NeurIPS 2020. https://arxiv.org/abs/2006.08848

A client's objective is the Moreau envelope of its loss f: the loss of theta, the best model near w,
plus its distance to w (eq. 2, 3). A step on w, with one mini-batch (Algorithm 1):

    F(w)   = min over theta of f(theta) + (lambda / 2) ||theta - w||^2
    theta <- theta - lr (grad f(theta) + lambda (theta - w))          ``steps`` times, K
    w     <- w - eta_l lambda (w - theta)

eta_l is ``local.lr``; the paper's beta is ``server.lr``. theta begins as x in every round and goes
on from step to step, as in the authors' code. After a round's last step it is the client's own
model, which is evaluated (``evaluation.model=clients``; ``both`` adds the global one), with y_i's
BatchNorm statistics. No state survives a round. lambda = 0 does not move w.

lambda (w - theta) takes the place of grad f(w): it goes through the local optimizer, so that
momentum, weight decay, clipping and other methods' penalties act on w alone. A step costs K + 1
gradients. The authors' code adds .001 theta to the inner gradient, and trains all clients, even
those that were not sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, NotNegative, Positive
from fedhet.strategies.base import ClientSide, LocalContext, LocalOptimizer, Step, Tensors
from fedhet.strategies.components.second_model import slopes_at
from fedhet.strategies.fedsam import SAM
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.per_fedavg import PerFedAvgOptimizer


@dataclass(eq=False)
class PFedMeClient(ClientSide):
    """Takes steps down the Moreau envelope of the task's loss."""

    coefficient: float
    steps: int
    lr: float

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse optimizers that look ahead along f's gradient, which w lacks here."""
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
        """Note the mini-batch; return 0 with a slope that removes f from w's gradient."""
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


class PFedMe(Method):
    """pFedMe (Dinh et al. 2020): personalised; trains a global model with a good model near it for
    every client (Moreau envelopes).
    """

    replaces = frozenset({"loss"})
    settings = OWN_MODELS

    coefficient: NotNegative = 15.0
    """lambda, how strongly the client's own model is drawn to the one that travels; the authors'
    scripts: 15 to 30"""
    steps: Count = 5
    """K, gradient steps on the own model per step of the model that travels"""
    lr: Positive = 0.05
    """size of these steps, below 2 / (coefficient + the loss's largest curvature); the authors'
    scripts: .01 to .1"""

    def parts(self) -> Parts:
        """Step down the envelope at the clients."""
        return Parts(client_sides={"pfedme": PFedMeClient(self.coefficient, self.steps, self.lr)})
