"""FedRoD: bridging generic and personalized federated learning for image classification.

Chen, Chao. ICLR 2022. https://arxiv.org/abs/2107.00778

One body, two heads. The generic head G is trained with the body and averaged, as in FedAvg, but on
the balanced softmax loss, in which a client's frequent classes count for less. The personalised
head P stays at the client and learns what G misses (eq. 5 to 7). With z (B, d) the features, n_i[c]
client i's examples of class c, and ``local.lr`` for eta_l:

    body, G: E epochs of the local optimizer on f(G z + log n_i, labels)
    P <- P - eta_l grad f(G z + P z, labels)          with every step, z and G z held; from P = 0

The client's own model, body and G + P, is evaluated (``evaluation.model=clients``; ``both`` adds
the generic one). f is the task's loss; log n_i shifts its logits even if f is not the
cross-entropy. A class that a client lacks gets no gradient in G there.

The authors published no code. PFLlib and fluke begin P as a copy of G. The paper's second form, in
which a hypernetwork makes P, is not here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.strategies.base import (
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Step,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import linear_classifier
from fedhet.strategies.fedlc import ShiftedLogitsClient
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts

HEAD = "fedrod_head"  # P, in the client state
_WEIGHT, _BIAS = "head.weight", "head.bias"


class FedRoDClient(ShiftedLogitsClient):
    """Trains the shared head on a balanced loss, and a second head that stays at the client."""

    own_state = frozenset({HEAD})
    plain_steps = "the clients' own heads"

    def __init__(self) -> None:
        super().__init__(1.0, torch.log, "fedrod")

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier that is not linear: two of them would not add up."""
        linear_classifier(model, "FedRoD adds a second head to")

    def begin(self, context: LocalContext) -> None:
        """Count the classes; load P."""
        super().begin(context)
        names = [name for name in (_WEIGHT, _BIAS) if name in context.params]
        zero = {name: torch.zeros_like(context.params[name]) for name in names}
        self.head = dict(context.state.get(HEAD, zero))

    def penalty(self, step: Step) -> Tensor | None:
        """Move P; return the term that turns the loss of G into the balanced one."""
        if step.context.first_pass:
            self._move_head(step)
        return super().penalty(step)

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep P."""
        context.state[HEAD] = self.head
        return {}

    def own_model(self, context: LocalContext) -> Tensors:
        """Return G + P."""
        return {name: context.params[name].detach() + p for name, p in context.state[HEAD].items()}

    @torch.enable_grad()
    def _move_head(self, step: Step) -> None:
        at = {name: value.detach().requires_grad_() for name, value in self.head.items()}
        added = F.linear(step.features.detach(), at[_WEIGHT], at.get(_BIAS))
        loss = step.context.loss(step.logits.detach() + added, step.labels)
        slopes = torch.autograd.grad(loss, list(at.values()))
        self.head = {
            name: value.detach() - step.context.lr * slope
            for (name, value), slope in zip(at.items(), slopes, strict=True)
        }


class FedRoD(Method):
    """FedRoD (Chen, Chao 2022): personalised; clients share a head that is trained on a
    class-balanced loss, and each keeps a second head for its own classes.
    """

    replaces = frozenset({"loss"})
    settings = OWN_MODELS

    def parts(self) -> Parts:
        """Add the second head at the clients."""
        return Parts(client_sides={"fedrod": FedRoDClient()})
