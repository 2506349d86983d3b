"""FLoRA: federated fine-tuning large language models with heterogeneous low-rank adaptations.

Wang, Shen, He, Sun, Wang, Lyu, Li. NeurIPS 2024. https://arxiv.org/abs/2409.05976

The clients' adapters are stacked: the A_i one below the other, weighted, and the B_i side by side.
So the product of the stacks is the mean of the products. It is added to the weights, and every
client begins the next round with new adapters on them (Algorithm 1):

    A = [p_1 A_1; ...; p_K A_K],  B = [B_1, ..., B_K],    p_i = n_i / sum_j n_j
    W <- W + (alpha / r) B A = W + (alpha / r) sum_i p_i B_i A_i
    A_i random, B_i = 0 at the start of each round

The adapters' ranks r_i may differ: ``ranks``. A client with a smaller rank than task.lora.r leaves
the last rows of its A_i and columns of its B_i at zero, where they have no gradient; they travel
all the same. alpha / r is the same for all, as in the released code (lora_alpha = 2 r_i).

What travels: the paper sends the stacks to all clients, which add them to their own W. Here W
itself goes to the clients (``task.lora.share_base``), so one that missed rounds has the right one;
clients send adapters alone. The server's A and B keep their initial values, B = 0, so the model is
W. What task.lora trains in full, the classifier and modules_to_save, is averaged as in FedAvg.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import Count
from fedhet.strategies.base import LocalContext, Payloads, ServerSide, Tensors
from fedhet.strategies.components.adapter_products import SHARED_BASE, AdapterProducts, SentAdapters
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

RANK = "lora_rank"


class StackedAdapters(AdapterProducts):
    """Adds the mean product to W, and leaves A and B as they are."""

    def changes(self, params: Tensors, mean: Tensors, products: Tensors) -> dict[str, Tensor]:
        """Return the changes of W, A and B."""
        return {n: 0 * x for n, x in params.items() if ".lora_" in n} | dict(products)


class FLoRAClient(SentAdapters):
    """Begins every round with new adapters of the client's rank."""

    needs = frozenset({RANK})
    moves_start = True

    @torch.no_grad()
    def begin(self, context: LocalContext) -> None:
        """Draw what of the adapters begins random, as peft does; the rest begins at zero."""
        rank = int(context.received[RANK]["rank"])
        for name, param in context.params.items():
            if ".lora_A." in name:  # Kaiming's uniform distribution with a = sqrt(5)
                bound = 1.0 / math.sqrt(param[0].numel())
                drawn = torch.rand(param.shape, generator=context.generator, dtype=param.dtype)
                param.copy_(bound * (2.0 * drawn - 1.0))
                param[rank:] = 0.0
            elif ".lora_embedding_B." in name:
                drawn = torch.randn(param.shape, generator=context.generator, dtype=param.dtype)
                param.copy_(drawn)
                param[:, rank:] = 0.0
        context.start_here()


class FLoRAServer(ServerSide):
    """Tells every client its rank."""

    sends = frozenset({RANK})

    def __init__(self, ranks: list[int] | None) -> None:
        self.ranks = ranks

    def broadcast(self, client_id: int) -> Payloads:
        """Return the client's rank; without ``ranks`` it is above all."""
        rank = self.ranks[client_id % len(self.ranks)] if self.ranks else 1 << 20
        return {RANK: {"rank": torch.tensor(float(rank))}}


class FLoRA(Method):
    """FLoRA (Wang et al. 2024): adds the exact mean of LoRA's products B A to the weights, and
    begins each round with new adapters, whose ranks may differ by client.
    """

    replaces = frozenset({"aggregator", "phases"})
    settings = SHARED_BASE
    requires = MappingProxyType({"task.lora.share_base": True, "strategy.aggregator": None})

    ranks: list[Count] | None = None
    """the clients' ranks by their number, from the beginning again after the last; at most
    task.lora.r; null: task.lora.r for all"""

    def parts(self) -> Parts:
        """Give clients new adapters, and add the mean of their products to W."""
        return Parts(
            client_sides={"flora": FLoRAClient()},
            server_sides={"flora": FLoRAServer(self.ranks)},
            aggregator=StackedAdapters(),
        )
