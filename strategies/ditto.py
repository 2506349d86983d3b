"""Ditto: fair and robust federated learning through personalization.

Li, Hu, Beirami, Smith. ICML 2021. https://arxiv.org/abs/2012.04221

FedAvg, and beside it every client trains its own model v_i, which the received x pulls towards
itself (Algorithm 1). With every step of y_i, on the same mini-batch as in the authors' code:

    v_i <- v_i - eta_l (grad f_i(v_i) + lambda (v_i - x))

f_i is the task's loss, eta_l is ``local.lr`` of the round; the steps are plain SGD, whatever y_i's
are. v_i begins as the first x that the client receives and stays at the client, so the global model
is FedAvg's to the bit. The evaluated models are the v_i, with their own BatchNorm statistics
(``evaluation.model=clients``; ``both`` adds the global one). With lambda = 0 each client trains v_i
alone; from eta_l lambda = 2 on, v_i cannot settle. lambda is 1 in most of the authors' scripts;
with ``dynamic_lam``, which is not here, each client takes the best of .1, 1 and 2 on validation
examples at every step.

In the authors' code v_i begins as the run's initial model, even if a client joins later.
"""

from __future__ import annotations

import torch

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, LocalContext, LocalSummary, Payloads, Step, Tensors
from fedhet.strategies.components.second_model import second_model, slopes_at
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts

OWN = "ditto"  # v_i, in the client state


class DittoClient(ClientSide):
    """Trains a second model, which stays at the client; ``coefficient`` is lambda."""

    own_state = frozenset({OWN})
    plain_steps = "the clients' own models"

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def begin(self, context: LocalContext) -> None:
        """Load v_i."""
        self.own = second_model(context, OWN)

    def penalty(self, step: Step) -> None:
        """Move v_i on the step's mini-batch."""
        context, x = step.context, step.context.received_state
        if not context.first_pass:
            return
        slopes = slopes_at(self.own, step)
        with torch.no_grad():
            for name, slope in slopes.items():
                value = self.own[name]
                value -= context.lr * (slope + self.coefficient * (value - x[name]))

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep v_i."""
        context.state[OWN] = self.own
        return {}

    def own_model(self, context: LocalContext) -> Tensors:
        """Return v_i."""
        return context.state[OWN]


class Ditto(Method):
    """Ditto (Li et al. 2021): personalised; FedAvg, and every client trains a second model near
    the global one, which it keeps.
    """

    settings = OWN_MODELS

    coefficient: NotNegative = 1.0
    """lambda, how strongly the global model pulls the client's own; 0 trains it alone; the authors'
    scripts have 1"""

    def parts(self) -> Parts:
        """Add the second model at the clients."""
        return Parts(client_sides={"ditto": DittoClient(self.coefficient)})
