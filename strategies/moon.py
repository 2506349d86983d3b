"""MOON: model-contrastive federated learning.

Li, He, Song. CVPR 2021. https://arxiv.org/abs/2103.16257

z are the features of an example in the local model, z_glob in the model as received, z_prev in the
client's own model of an earlier round. Training pulls z to z_glob and away from z_prev (eq. 3, 4):

    L(y) = CE(y) + mu mean over the batch of - log(g / (g + p))
    g = exp(cos(z, z_glob) / tau),   p = exp(cos(z, z_prev) / tau), summed over the previous models

The other models are frozen and in eval mode. mu = 0 is FedAvg. The paper tunes mu in {.1, 1, 5, 10}
(5 for CIFAR-10, 1 for CIFAR-100), with tau = .5 and one previous model.

A client keeps its whole trained model, with buffers and personal parts, as a previous model for its
next participation, and drops the oldest if it has more than ``previous``. Its first round has no
term. (In a client's first round the released code contrasts with the initial model. This is the
same only in round 1, where the term is log 2 with gradient 0.)

The paper takes z from a projection of 256 values between encoder and classifier; here z is the
model's features, as in FedDW's code. The released code has lr .01, momentum .9, weight decay 1e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, log_softmax

from fedhet.common.kinds import Count, NotNegative, Positive
from fedhet.strategies.base import ClientSide, LocalContext, LocalSummary, Payloads, Step, Tensors
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

_STATE = "moon-previous"


class MOONClient(ClientSide):
    """Pulls the features to the global model's and away from the client's ``previous`` models'."""

    def __init__(self, mu: float, tau: float, previous: int) -> None:
        self.mu = mu
        self.tau = tau
        self.previous = previous
        self.contrasted: list[nn.Module] = []

    def begin(self, context: LocalContext) -> None:
        """Build the previous models, frozen, if there are any."""
        self.contrasted = []
        for state in self._kept(context):  # none at mu = 0
            model = copy.deepcopy(context.global_model)
            model.load_state_dict(dict(state), strict=True)
            self.contrasted.append(model)

    def penalty(self, step: Step) -> Tensor | None:
        """Return mu times eq. 3, a scalar; None at mu = 0 and before there is a previous model."""
        if not self.contrasted:
            return None
        with torch.no_grad():
            others = [model(step.inputs)[0] for model in self.contrasted]
        others.insert(0, step.context.received_features(step.inputs))
        return self.mu * contrastive_loss(step.features, others, self.tau)

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep the trained model in the client state, and the latest of the older ones."""
        self.contrasted = []
        if self.mu > 0:
            trained = {n: v.detach().clone() for n, v in context.model.state_dict().items()}
            kept = [trained, *self._kept(context)][: self.previous]
            context.state.update({f"{_STATE}-{age}": state for age, state in enumerate(kept)})
        return {}

    def _kept(self, context: LocalContext) -> list[Tensors]:
        """Return the previous models, the latest first."""
        names = [f"{_STATE}-{age}" for age in range(self.previous)]
        return [context.state[name] for name in names if name in context.state]


def contrastive_loss(features: Tensor, others: Sequence[Tensor], tau: float) -> Tensor:
    """Return eq. 3, a scalar, of z (B, d) and of z_glob, then every z_prev (B, d)."""
    similarities = [cosine_similarity(features, other, dim=1) for other in others]
    return -log_softmax(torch.stack(similarities, dim=1) / tau, dim=1)[:, 0].mean()


class MOON(Method):
    """MOON (Li et al. 2021): pulls features towards the global model's and away from those of the
    client's previous model; against drifting features.
    """

    mu: NotNegative = 5.0
    """weight of the term; the paper tunes it in {.1, 1, 5, 10}; 0 is FedAvg"""
    tau: Positive = 0.5
    """temperature of the similarities"""
    previous: Count = 1
    """how many of its previous models a client keeps"""

    def parts(self) -> Parts:
        """Add the term at the clients."""
        return Parts(client_sides={"moon": MOONClient(self.mu, self.tau, self.previous)})
