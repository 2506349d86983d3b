"""FedDistill+: federated distillation beside federated averaging.

Jeong, Oh, Kim, Park, Bennis, Kim. 2018. https://arxiv.org/abs/1811.11479 (federated distillation)

As in table IV of FedDW (Liu et al. 2024, https://arxiv.org/abs/2412.04521): the models are averaged
as in FedAvg, and the mean soft label of an example's class teaches every client:

    L(y) = CE(y) + lambda mean over the batch of KL(SL[label] || softmax(logits))

SL (C, C) is the mean soft label by class over all clients' examples (soft_labels.py; options
strategy.soft_labels.*); strategy=[feddistill,feddw] sends it once. lambda = 1; 0 is FedAvg.
Original federated distillation shares no parameters; the "+" adds FedAvg.
SL starts as the identity, for which KL is the cross-entropy: in round 1, and for a class that
nobody has held yet, the loss is (1 + lambda) CE.

FedDW's released code gives its KL probabilities where log probabilities belong, so that the term is
sum q (log q - p), linear in p.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedhet.common.errors import require_range
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.modes.private.gaussian_mechanism import GaussianMechanism
from fedhet.strategies.round.arguments import Slots
from fedhet.strategies.statistics.class_means import MEANS
from fedhet.strategies.statistics.soft_labels import SOFT_LABELS, SoftLabelClient, SoftLabelServer


class FedDistillClient(ClientSide):
    """Draws the outputs to the soft label of the example's class; ``coefficient`` is lambda."""

    needs = frozenset({SOFT_LABELS})

    def __init__(self, coefficient: float = 1.0) -> None:
        self.coefficient = require_range("strategy.feddistill.coefficient", coefficient)

    def penalty(self, step: Step) -> Tensor | None:
        """Return lambda times the mean KL, a scalar; None at lambda = 0."""
        if self.coefficient == 0.0:
            return None
        taught = step.context.received[SOFT_LABELS][MEANS][step.labels]  # (B, C)
        said = log_softmax(step.logits, dim=1)
        return self.coefficient * kl_div(said, taught, reduction="batchmean")


class FedDistill(FederatedStrategy):
    """FedAvg's server with the mean soft label by class beside it; arguments as FedDW's."""

    def __init__(
        self,
        coefficient: float = 1.0,
        soft_labels: dict[str, Any] | None = None,
        mechanism: GaussianMechanism | None = None,
        **slots: Unpack[Slots],
    ) -> None:
        super().__init__(
            client_sides={
                "feddistill": FedDistillClient(coefficient),
                "soft_labels": SoftLabelClient(mechanism),
            },
            server_sides={
                "soft_labels": SoftLabelServer(**(soft_labels or {}), mechanism=mechanism)
            },
            **slots,
        )
