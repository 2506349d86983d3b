"""FedNTD: preservation of the global knowledge by not-true distillation in federated learning.

Lee, Jeong, Shin, Bae, Yun. NeurIPS 2022. https://arxiv.org/abs/2106.03097

A client that sees few classes forgets the others. So the local model's outputs for the classes
other than the example's own are pulled to the received model's (eq. 3 to 5):

    L(y) = CE(y) + beta KL(q_x || q_y)
    q    = softmax of the logits without the true class's, over tau

q_x comes from the received model, in eval mode, q_y from the local model; KL is the mean over the
batch. beta = 0 is FedAvg. The paper has beta = 1 and tau = 1. Where the released code differs: it
multiplies the divergence by tau^2, as distillation does, which is 1 at the paper's tau.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedhet.common.kinds import NotNegative, Positive
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class FedNTDClient(ClientSide):
    """Pulls the outputs for all classes but the true one to the received model's."""

    by_class = True

    def __init__(self, beta: float, tau: float) -> None:
        self.beta, self.tau = beta, tau

    def penalty(self, step: Step) -> Tensor | None:
        """Return beta KL(q_x || q_y), a scalar; None at beta = 0."""
        if self.beta == 0.0:
            return None
        with torch.no_grad():
            _, logits = step.context.global_model(step.inputs)
        received, local = (self._not_true(one, step.labels) for one in (logits, step.logits))
        return self.beta * kl_div(local, received, reduction="batchmean", log_target=True)

    def _not_true(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log q (B, C - 1) of logits (B, C)."""
        others = torch.arange(logits.shape[1] - 1, device=labels.device).expand(len(labels), -1)
        others = others + (others >= labels[:, None])  # the classes without the example's own
        return log_softmax(logits.gather(1, others) / self.tau, dim=1)


class FedNTD(Method):
    """FedNTD (Lee et al. 2022): keeps the received model's outputs for the other classes than the
    example's own, which clients with few classes forget; against label skew.
    """

    beta: NotNegative = 1.0
    """weight of the divergence; 0 is FedAvg"""
    tau: Positive = 1.0
    """temperature of the outputs"""

    def parts(self) -> Parts:
        """Add the divergence at the clients."""
        return Parts(client_sides={"fedntd": FedNTDClient(self.beta, self.tau)})
