"""FFA-LoRA: improving LoRA in privacy-preserving federated learning.

Sun, Li, Li, Ding. ICLR 2024. https://arxiv.org/abs/2403.12313

With task.lora a layer is W x + (alpha / r) B A x. A mean of the clients' A times a mean of their B
is not the mean of their B A. With one A everywhere, it is: A keeps its initial, random values, and
only B is trained and averaged:

    sum_i p_i (B_i A) = (sum_i p_i B_i) A,    p_i = n_i / sum_j n_j

So about half of the numbers travel, and differential privacy has no product of noise on A and noise
on B. A does not travel at all: server and clients draw it from the run's seed. What task.lora
trains in full, the classifier and modules_to_save, is averaged as in FedAvg.

Adapters of embeddings begin the other way round, A at zero and B random; peft names their A
lora_embedding_A. They are trained and averaged in full, as in FedAvg.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.method import Method


class FFALoRA(Method):
    """FFA-LoRA (Sun et al. 2024): the adapters' A stays as it was initialised, and B alone is
    trained and averaged, so the mean of the adapters is exact.
    """

    name = "ffa_lora"
    replaces = frozenset({"personal", "phases"})
    settings = MappingProxyType(
        {
            "strategy.personal": "*.lora_A.*",  # it does not travel: it is the same everywhere
            "strategy.phases": [{"layers": "not:*.lora_A.*", "epochs": None}],
        }
    )
    requires = MappingProxyType({"local.initial": "received"})  # one A, the same everywhere
