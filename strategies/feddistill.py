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

FedDW's released code passes probabilities to its KL instead of log probabilities, so its term is
sum q (log q - p), linear in p.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_means import MEANS
from fedhet.strategies.statistics.soft_labels import SOFT_LABELS, SoftLabels


class FedDistillClient(ClientSide):
    """Pulls the outputs to the soft label of the example's class; ``coefficient`` is lambda."""

    needs = frozenset({SOFT_LABELS})

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def penalty(self, step: Step) -> Tensor | None:
        """Return lambda times the mean KL, a scalar; None at lambda = 0."""
        if self.coefficient == 0.0:
            return None
        taught = step.context.received[SOFT_LABELS][MEANS][step.labels]  # (B, C)
        said = log_softmax(step.logits, dim=1)
        return self.coefficient * kl_div(said, taught, reduction="batchmean")


class FedDistill(Method):
    """FedDistill+ (Jeong et al. 2018): averages models and pulls each client's outputs towards the
    class's mean soft label of all clients; against label skew.
    """

    coefficient: NotNegative = 1.0
    """lambda, the coefficient of the divergence; 0 is FedAvg"""
    soft_labels: SoftLabels = SoftLabels()

    def parts(self) -> Parts:
        """Add the divergence at the clients."""
        return Parts(client_sides={"feddistill": FedDistillClient(self.coefficient)})
