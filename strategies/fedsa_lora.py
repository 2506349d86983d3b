"""FedSA-LoRA: selective aggregation for low-rank adaptation in federated learning.

Guo, Zeng, Wang, Fan, Wang, Qu. ICLR 2025. https://arxiv.org/abs/2410.01463

With task.lora a layer is W x + (alpha / r) B A x. The paper finds that A learns what the clients
have in common and B what is their own. So a client trains both, sends A, and keeps B:

    (A_i, B_i): E epochs of the local optimizer from (A, B_i), on both together
    A <- A + eta_g sum_i (n_i / sum_j n_j) (A_i - A)

There is no global model, so the clients' own models are evaluated (``evaluation.model=clients``).
The classifier stays, too, as in the authors' code for GLUE (local_param: lora_B, classifier);
``strategy.personal=*.lora_B.*`` averages it. A causal language model has none that is trained.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.method import Method


class FedSALoRA(Method):
    """FedSA-LoRA (Guo et al. 2025): personalised; clients share the adapters' A, and each keeps its
    B and its classifier.
    """

    name = "fedsa_lora"
    replaces = frozenset({"personal"})
    settings = MappingProxyType(
        {"strategy.personal": "*.lora_B.*,head.*", "evaluation.model": "clients"}
    )
