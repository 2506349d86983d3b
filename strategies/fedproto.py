"""FedProto: federated prototype learning across heterogeneous clients.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022. https://arxiv.org/abs/2105.00243

Clients share no parameters, only their mean features by class, the prototypes P (C, d). With z the
features of an example, the input of the classifier (eq. 7, 8, by example as in the released code):

    L(y) = CE(y) + lambda mean over the batch of ||z - P[label]||^2 / d        lambda = 1

A client sends, by class, the sum of its examples' features and their number (eq. 3). P[c] is the
mean over everybody's examples of class c (eq. 6 without its further 1 / |N_j|, which would shrink
P; the released code takes the plain mean of the clients' means). Round 1 has no term. A class
without a prototype adds 0; a class that nobody in the round holds keeps its prototype.

The recipe keeps all tensors at the clients (strategy.personal=all) and scores the clients' models;
lambda = 0 is then local training, or FedAvg if parameters are shared. C d floats go down,
C d + C up: the server learns a client's class counts and mean features. The paper predicts by the
nearest prototype (eq. 4); here, as in FedDW's comparison, a model predicts by its logits.

In FedDW's comparison z is the extractor's output, two layers earlier; all uploads since round 1 are
averaged; and from round 2 on a class without a prototype has one of zeros.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalSummary,
    Payloads,
    RefusedReplyError,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Step,
    Tensors,
)
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_means import COUNTS, MEANS, SUMS, class_means, class_sums

PROTOTYPES = "prototypes"
PROTOTYPE_SUMS = "prototype_sums"


class PrototypeClient(ClientSide):
    """Pulls features to the global prototype of their class; ``coefficient`` is lambda."""

    by_class = True
    needs, sends = frozenset({PROTOTYPES}), frozenset({PROTOTYPE_SUMS})
    per_example, counts = frozenset({PROTOTYPE_SUMS}), frozenset({COUNTS})

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def penalty(self, step: Step) -> Tensor | None:
        """Return lambda times the mean squared distance, a scalar; None where nothing is known."""
        prototypes = step.context.received[PROTOTYPES].get(MEANS)  # None in round 1
        if prototypes is None or self.coefficient == 0.0:
            return None
        return self.coefficient * prototype_distance(step.features, prototypes[step.labels])

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Send sums (C, d) and counts (C,)."""
        return {PROTOTYPE_SUMS: class_sums(context, lambda features, logits: features)}


def prototype_distance(features: Tensor, prototypes: Tensor) -> Tensor:
    """Return the mean over the batch of ||z - P||^2 / d, a scalar; z and P (B, d).

    A row of zeros in P: the example's class has no prototype, and adds 0.
    """
    known = prototypes.any(dim=1)
    distances = (features - prototypes).square().mean(dim=1)
    return torch.where(known, distances, 0.0).mean()


class PrototypeServer(ServerSide):
    """Keeps the prototypes, the class-wise means of everybody's features."""

    needs, sends = frozenset({PROTOTYPE_SUMS}), frozenset({PROTOTYPES})
    kept = (PROTOTYPES,)

    def init(self, params: Tensors) -> None:
        """Start without prototypes."""
        # one object for all clients of a round: it is serialised once
        self.prototypes: dict[str, Tensor] = {}

    def broadcast(self, client_id: int) -> Payloads:
        """Send the prototypes (C, d), a row of zeros for a class without; nothing in round 1."""
        return {PROTOTYPES: self.prototypes}

    def expected(self) -> Shapes:
        """Sums (C, d) and counts (C,); C and d are open in round 1."""
        known = self.prototypes.get(MEANS)
        classes, size = (None, None) if known is None else known.shape
        return {PROTOTYPE_SUMS: {SUMS: (classes, size), COUNTS: (classes,)}}

    def check(self, reply: Reply) -> None:
        """Refuse sums and counts of different numbers of classes."""
        sums, counts = (reply.payloads[PROTOTYPE_SUMS][name] for name in (SUMS, COUNTS))
        if sums.shape[:1] != counts.shape:
            raise RefusedReplyError(
                f"its prototypes have shape {tuple(sums.shape)} with counts {tuple(counts.shape)}"
            )

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """Take the mean of each class that somebody holds."""
        sums, counts = (total.payloads[PROTOTYPE_SUMS][name] for name in (SUMS, COUNTS))
        old = self.prototypes.get(MEANS, torch.zeros_like(sums))
        self.prototypes = {MEANS: class_means(sums, counts, old)}


class FedProto(Method):
    """FedProto (Tan et al. 2022): shares class means of features instead of parameters; for clients
    whose models may not leave.
    """

    replaces = frozenset({"personal"})
    settings = MappingProxyType({"strategy.personal": "all", "evaluation.model": "clients"})

    coefficient: NotNegative = 1.0
    """lambda, the coefficient of the squared distance to the prototype; 0 is local training"""

    def parts(self) -> Parts:
        """Share the prototypes."""
        return Parts(
            client_sides={"fedproto": PrototypeClient(self.coefficient)},
            server_sides={"fedproto": PrototypeServer()},
        )
