"""FedBABU: toward enhanced representation for federated image classification.

Oh, Kim, Yun. ICLR 2022. https://arxiv.org/abs/2106.06042

A model is a body and a head. The head stays as it was initialised, the same at all clients, and
only the body is trained and averaged (Algorithm 1):

    b_i: E epochs on the body alone, from b, at the initial head
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

The head does not travel: server and clients initialise it from the run's seed, so the global model
exists and is evaluated. The paper then personalises it by a few epochs on the whole model at every
client (its code: 5): ``evaluation.clients=true evaluation.finetune_epochs=5``.
FedDW's released code has no such fine-tuning, like the recipe. It sends the head, too.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.method import Method


class FedBABU(Method):
    """FedBABU (Oh et al. 2022): trains and shares the body alone; the head stays as it was
    initialised. For fine-tuning at each client afterwards.
    """

    replaces = frozenset({"personal", "phases"})
    settings = MappingProxyType(
        {
            "strategy.personal": "head.*",  # it does not travel: it is the same everywhere
            "strategy.phases": [{"layers": "body.*", "epochs": None}],
        }
    )
    requires = MappingProxyType({"local.initial": "received"})  # one head, the same everywhere
