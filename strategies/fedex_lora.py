"""FedEx-LoRA: exact aggregation for federated and efficient fine-tuning of large language models.

Singhal, Ponkshe, Vepakomma. ACL 2025. https://arxiv.org/abs/2410.09432

A and B are averaged apart, as in FedAvg, and what their product lacks of the mean of the clients'
products is added to the frozen weights:

    A <- sum_i p_i A_i,  B <- sum_i p_i B_i,    p_i = n_i / sum_j n_j
    W <- W + (alpha / r) (sum_i p_i B_i A_i - B A)

So W + (alpha / r) B A is the mean of the clients' models. The paper has p_i = 1 / K, sends the
clients the residual, of rank up to K r, as two factors, and lets each add it to its own W. Here W
itself goes to the clients (``task.lora.share_base``), so one that missed rounds has the right one;
clients send adapters alone. What task.lora trains in full is averaged as in FedAvg.

The released code adds the transposed residual, which is right for GPT-2's layers (their weights are
(inputs, outputs)), and not for those of RoBERTa, whose adapted layers are square; here a layer gets
its own.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor

from fedhet.strategies.base import Tensors
from fedhet.strategies.components.adapter_products import (
    BASE,
    SHARED_BASE,
    AdapterProducts,
    SentAdapters,
)
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class ResidualToBase(AdapterProducts):
    """Averages A and B, and adds the rest of the mean product to W."""

    def changes(self, params: Tensors, mean: Tensors, products: Tensors) -> dict[str, Tensor]:
        """Return the changes of W."""
        stepped = {name: x + mean[name] for name, x in params.items()}
        return {
            name: value - self.product(name.removesuffix(BASE), stepped)
            for name, value in products.items()
        }


class FedExLoRA(Method):
    """FedEx-LoRA (Singhal et al. 2025): averages LoRA's A and B, and adds to the weights what their
    product lacks of the mean of the products B A, which is exact.
    """

    name = "fedex_lora"
    replaces = frozenset({"aggregator", "phases", "server_optimizer"})
    settings = SHARED_BASE
    requires = MappingProxyType(
        {
            "task.lora.share_base": True,
            "strategy.aggregator": None,
            "strategy.server_optimizer": None,
            "server.lr": 1.0,
        }
    )

    def parts(self) -> Parts:
        """Replace the aggregator."""
        return Parts(client_sides={"fedex_lora": SentAdapters()}, aggregator=ResidualToBase())
