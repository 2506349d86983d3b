"""FedDW: distilling weights through consistency optimization in heterogeneous federated learning.

Liu, Wang, Wang, Yang, Tao. 2024. https://arxiv.org/abs/2412.04521

Two matrices say how classes relate: CR, the row softmax of W W^T, with W (C, d) the weight of a
classifier without bias, and SL, the mean soft label by class (soft_labels.py, eq. 4 to 7). On IID
data they agree; a client's CR is drawn to everybody's SL:

    L(y) = CE(y) + mu mean over the C^2 entries of (SL - softmax_rows(W W^T))^2        (eq. 10, 11)

SL is a constant, so the gradient reaches W alone, and is the same for every batch. The term lies
in (0, 2 / C) (eq. 18). mu = 0 is FedAvg with a classifier without bias. The paper tunes mu in
{.01, .1, 1, 10, 100}: .1 for CIFAR-10, 10 for CIFAR-100.

``linearised_every=n`` is the convex variant, eq. 26 to 30. The paper contradicts itself: eq. 23 has
A for softmax(W W^T), and the lines below it A^T A. Here A is W^T, without softmax. With a reference
W_0, taken anew every n steps, the term is

    mu mean over the C^2 entries of (SL - (W_0 W^T + W W_0^T - W_0 W_0^T))^2

a convex quadratic in W with the value and the gradient of (SL - W W^T)^2 at W = W_0. (Eq. 30 sums
over the entries; the mean makes mu comparable with eq. 11's.)

Where the paper's text differs: eq. 13 has theta_{t+1} for theta_t. Where the released code differs:
it keeps the classifier's bias (rejected here) unless its ``init_align`` holds it at 0 and starts
the weight with rows of length 1, spread on the sphere (``task.head_init=orthogonal``); it divides
mu by 10 at the start of rounds 9, 18, 27 and so on (``decay=0.1 decay_every=9``, off by default);
soft_labels.py has the differences in SL. The term acts from round 1 on, against the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softmax

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, NotNegative, Share, Whole
from fedhet.strategies.base import ClientSide, LocalOptimizer, Step
from fedhet.strategies.components.tensor_selection import linear_classifier
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_means import MEANS
from fedhet.strategies.statistics.soft_labels import HEAD, SOFT_LABELS, SoftLabels


@dataclass(eq=False)
class FedDWClient(ClientSide):
    """Pulls the class relations of the classifier's weight to the global soft labels."""

    needs = frozenset({SOFT_LABELS})

    mu: float
    decay: float
    decay_every: int
    linearised_every: int

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier that is not linear, or has a bias."""
        if linear_classifier(model, "FedDW ties the weight of").bias is not None:
            raise ConfigError(
                "FedDW needs a classifier without bias (paper, section V-A), and `head` has one: "
                "set task.head_bias=false"
            )

    def penalty(self, step: Step) -> Tensor | None:
        """Return mu times eq. 11 (or 30), a scalar; None at mu = 0."""
        mu = self.mu * self.decay ** (step.context.round // self.decay_every)
        if mu == 0.0:
            return None
        weight = step.params[HEAD]
        with torch.autocast(weight.device.type, enabled=False):  # W W^T in all its digits
            relations = self._relations(weight, step)
            return mu * mse_loss(relations, step.context.received[SOFT_LABELS][MEANS])

    def _relations(self, weight: Tensor, step: Step) -> Tensor:
        if not self.linearised_every:
            return class_relations(weight)
        if step.context.first_pass and step.context.num_steps % self.linearised_every == 0:
            self.reference = weight.detach().clone()
        cross = weight @ self.reference.T  # W W^T expanded about the reference (eq. 27)
        return cross + cross.T - self.reference @ self.reference.T


def class_relations(weight: Tensor) -> Tensor:
    """Return CR (C, C), the row softmax of W W^T, of a classifier's weight W (C, d)."""
    return softmax(weight @ weight.T, dim=1)


class FedDW(Method):
    """FedDW (Liu et al. 2024): pulls the class relations of the classifier, softmax(W W^T), towards
    the mean soft labels of all clients; against label skew.
    """

    settings = MappingProxyType({"task.head_bias": False})

    mu: NotNegative = 0.1
    """weight of the term; the paper tunes it in {.01, .1, 1, 10, 100}; 0 is FedAvg with a
    classifier without bias"""
    decay: Share = 1.0
    """factor on mu at the start of every decay_every rounds; the released code has .1"""
    decay_every: Count = 9
    """how many rounds pass between two decays"""
    linearised_every: Whole = 0
    """0: eq. 11; n: the convex variant, eq. 30, its reference taken again every n steps"""
    soft_labels: SoftLabels = SoftLabels()

    def parts(self) -> Parts:
        """Add the term at the clients."""
        side = FedDWClient(self.mu, self.decay, self.decay_every, self.linearised_every)
        return Parts(client_sides={"feddw": side})
