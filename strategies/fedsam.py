"""FedSAM and MoFedSAM: generalized federated learning via sharpness aware minimization.

Qu, Li, Duan, Liu, Tang, Lu. ICML 2022. https://arxiv.org/abs/2206.02618

A local step takes the gradient where, within a ball of radius rho, the loss is highest to first
order (Foret et al., ICLR 2021, https://arxiv.org/abs/2010.01412):

    e  = rho grad F(y) / ||grad F(y)||          over all trained tensors as one vector
    y <- y - eta_l grad F(y + e)                on the same mini-batch

Adaptive, the ball is one in relative sizes (ASAM: Kwon, Kim, Park, Choi. ICML 2021,
https://arxiv.org/abs/2102.11600, T = diag |y|), so that a layer that is scaled up and the next one
down have the same perturbation, relative to their size; rho is then larger, .5 is usual:

    e  = rho y^2 grad F(y) / || |y| grad F(y) ||

as in FL-Simulator's code, without the paper's eta = .01 that is added to |y|: a number that is
exactly 0 is not perturbed.

F is the whole local objective, with the penalties of other methods, in both passes. Corrections
(momentum, control variates), clipping and weight decay act on the second gradient, at y. rho = 0 is
FedAvg, with one pass. MoFedSAM adds FedCM's client momentum (fedcm.py):
v = alpha grad F(y + e) + (1 - alpha) m.

Dropout draws a mask in each pass, and BatchNorm's statistics see both. FL-Simulator's code restores
y by subtracting e, which leaves rounding; here a copy is put back. rho is .1 there and .5 in
FedMRUR's paper, too large for a small network unless it is adaptive: tune it.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import Backward, Correct, NextBatch, Tensors
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.local_optimizers import SGD, optimizer_settings
from fedhet.strategies.fedcm import ClientMomentum
from fedhet.strategies.method import Method, MethodPart
from fedhet.strategies.parts import Parts

_LEAST_NORM = 1e-7


class SAM(SGD):
    """SGD along the gradient at the steepest point nearby, which ignores momentum and decay.

    Attributes:
        rho: radius of the perturbation, in L2 norm over all trained tensors.
        adaptive: scale each number's part of the perturbation by the number's size.
    """

    section = "local.optimizers"

    rho: NotNegative
    adaptive: bool = False

    def start(self, params: Tensors, lr: float) -> None:
        """Begin a round on these trainable tensors with this step size."""
        super().start(params, lr)
        self.params = list(params.values())

    def step(self, next_batch: NextBatch, backward: Backward, correct: Correct) -> Tensor:
        """Take one step and return the loss before it, at y."""
        batch = next_batch()
        loss = backward(batch)
        if self.rho > 0.0:
            trained = [param for param in self.params if param.grad is not None]
            start = [param.detach().clone() for param in trained]
            self._ascend(trained)
            backward(batch)
            with torch.no_grad():
                torch._foreach_copy_(trained, start)
        correct()
        self.move()
        return loss

    @torch.no_grad()
    def _ascend(self, params: list[Tensor]) -> None:
        """Move to y + e; the gradients are used up."""
        grads = [param.grad for param in params if param.grad is not None]
        sizes: list[Tensor] = list(torch._foreach_abs(params)) if self.adaptive else []
        if self.adaptive:
            torch._foreach_mul_(grads, sizes)
        length = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, self.rho / (length + _LEAST_NORM))
        if self.adaptive:
            torch._foreach_mul_(grads, sizes)
        torch._foreach_add_(params, grads)


class SharpnessAware(MethodPart):
    """Sharpness-aware local steps."""

    name = "sam"
    settings = optimizer_settings("sam", SAM, "rho", "adaptive")
    requires = MappingProxyType({"local.optimizer": "sam"})

    rho: NotNegative = 0.1
    """radius of the perturbation; 0 is plain SGD. Tune it: .5 is for a ResNet-18, or adaptive"""
    adaptive: bool = False
    """the perturbation is relative to each number's size (ASAM, Kwon et al. 2021)"""


class FedSAM(Method):
    """FedSAM (Qu et al. 2022): sharpness-aware steps at the clients lead to flat minima, which
    averaging harms less.
    """

    replaces = frozenset({"optimizer"})

    sam: SharpnessAware = SharpnessAware()


class MoFedSAM(Method):
    """MoFedSAM (Qu et al. 2022): FedSAM's sharpness-aware steps with FedCM's momentum at the
    clients.
    """

    replaces = frozenset({"optimizer"})

    client_momentum: ClientMomentum = ClientMomentum()
    sam: SharpnessAware = SharpnessAware()

    def parts(self) -> Parts:
        """Average the updates without weights."""
        return Parts(aggregator=UniformMean())
