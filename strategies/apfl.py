"""APFL: adaptive personalized federated learning.

Deng, Kamani, Mahdavi. 2020. https://arxiv.org/abs/2003.13461

FedAvg, and beside it every client trains its own model v_i. The client uses a mixture m_i of both,
which is evaluated (``evaluation.model=clients``; ``both`` adds the global model). Algorithm 1, with
the adaptive alpha_i:

    m_i = alpha_i v_i + (1 - alpha_i) y_i
    v_i     <- v_i - eta_l alpha_i grad f(m_i)            with every step of y_i, same mini-batch
    alpha_i <- clip(alpha_i - eta_a <v_i - y_i, grad f(m_i)>, 0, 1)     at a round's first step

v_i begins as the first x that the client receives, alpha_i as ``alpha``; both stay at the client,
so the global model is FedAvg's to the bit. f is the task's loss, eta_l is ``local.lr`` of the
round, and v_i takes plain SGD steps, whatever y_i's are. alpha = 0 with eta_a = 0 evaluates y_i,
FedAvg's trained models; with alpha = 1 and eta_a = 0 each client trains its model alone.

The paper writes eta for both step sizes. m_i has BatchNorm statistics from its own passes.

The authors' code (FedTorch, centered/apfl.py) differs: it mixes the two models' outputs, not their
tensors; y_i takes its step before v_i's gradient is computed; the slope of alpha_i is
<v_i - y_i, alpha grad_v + (1 - alpha) grad_y> in that pass, plus .02 alpha. The code of Ditto's
authors, who compare with APFL, mixes tensors as here, keeps alpha fixed, takes a round's first
gradient at the last round's m_i, and evaluates alpha v_i + (1 - alpha) x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative, Share
from fedhet.strategies.base import ClientSide, LocalContext, LocalSummary, Payloads, Step, Tensors
from fedhet.strategies.components.second_model import second_model, slopes_at
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts

OWN, ALPHA = "apfl_own", "apfl_alpha"  # v_i and alpha_i, in the client state


class APFLClient(ClientSide):
    """Trains a second model through its mixture with y_i, and learns its share of the mixture."""

    own_state = frozenset({OWN, ALPHA})
    plain_steps = "the clients' own models"

    def __init__(self, alpha: float, alpha_lr: float | None) -> None:
        self.first_alpha, self.alpha_lr = alpha, alpha_lr

    def begin(self, context: LocalContext) -> None:
        """Load v_i and alpha_i."""
        self.own = second_model(context, OWN)
        like = next(iter(context.params.values()))
        first = torch.full((), self.first_alpha, dtype=like.dtype, device=like.device)
        self.alpha = context.state.get(ALPHA, {ALPHA: first})[ALPHA]

    def penalty(self, step: Step) -> None:
        """Move v_i, and at a round's first step alpha_i, on the step's mini-batch."""
        context = step.context
        if not context.first_pass:
            return
        slopes = slopes_at(_mixed(self.own, step.params, self.alpha), step)
        with torch.no_grad():
            moved = {n: self.own[n] - context.lr * self.alpha * g for n, g in slopes.items()}
            if context.num_steps == 0:
                along = [((self.own[n] - step.params[n]) * g).sum() for n, g in slopes.items()]
                alpha_lr = context.lr if self.alpha_lr is None else self.alpha_lr
                self.alpha = (self.alpha - alpha_lr * sum(along)).clamp(0.0, 1.0)
            self.own |= moved

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep v_i and alpha_i."""
        context.state.update({OWN: self.own, ALPHA: {ALPHA: self.alpha}})
        return {}

    def own_model(self, context: LocalContext) -> Tensors:
        """Return m_i."""
        return _mixed(context.state[OWN], context.params, context.state[ALPHA][ALPHA])


@torch.no_grad()
def _mixed(own: Tensors, params: Tensors, alpha: Tensor) -> dict[str, Tensor]:
    """Return m_i: exactly y_i where alpha_i is 0, and v_i where it is 1; with v_i's buffers."""
    return {
        name: torch.lerp(params[name], value, alpha) if name in params else value
        for name, value in own.items()
    }


class APFL(Method):
    """APFL (Deng et al. 2020): personalised; FedAvg, and every client mixes a second model with
    the global one by a learnt share.
    """

    settings = OWN_MODELS

    alpha: Share = 0.5
    """the first share of the client's own model in the mixture"""
    alpha_lr: NotNegative | None = None
    """step size of the share; 0 keeps the share, null is local.lr"""

    def parts(self) -> Parts:
        """Add the second model at the clients."""
        return Parts(client_sides={"apfl": APFLClient(self.alpha, self.alpha_lr)})
