"""FedNTD: preservation of the global knowledge by not-true distillation in federated learning.

Lee, Jeong, Shin, Bae, Yun. NeurIPS 2022. https://arxiv.org/abs/2106.03097

    L(y) = CE(y) + weight * KL(q_x || q_y)

q: softmax of the logits / temperature without the true class, of the received model x and of the
local model y. weight = 0 is FedAvg.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.common.errors import require_range
from fedhet.strategies.base import ClientSide, Step


class FedNTDClient(ClientSide):
    """Keeps what the received model says about the classes that are not the true one."""

    def __init__(self, weight: float, temperature: float) -> None:
        self.weight = require_range("strategy.fedntd.weight", weight)
        self.temperature = require_range("strategy.fedntd.temperature", temperature, open_low=True)

    def penalty(self, step: Step) -> Tensor | None:
        """Return weight * KL(q_x || q_y), a scalar; None at weight 0."""
        if self.weight == 0.0:
            return None
        with torch.no_grad():
            _, logits = step.context.global_model(step.inputs)
        received = self._not_true(logits, step.labels)
        local = self._not_true(step.logits, step.labels)
        return self.weight * F.kl_div(local, received, reduction="batchmean", log_target=True)

    def _not_true(self, logits: Tensor, labels: Tensor) -> Tensor:
        others = F.one_hot(labels, logits.shape[1]) == 0  # (B, C)
        kept = logits[others].view(len(labels), -1)  # (B, C - 1)
        return F.log_softmax(kept / self.temperature, dim=1)
