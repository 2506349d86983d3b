"""FedBN: federated learning on non-IID features via local batch normalization.

Li, Jiang, Zhang, Kamp, Dou. ICLR 2021. https://arxiv.org/abs/2102.07623

Clients whose inputs differ, such as images of several scanners, have other statistics in every
layer. So a client keeps its normalisation layers, scale, shift and running statistics, and FedAvg
averages the rest w (Algorithm 1):

    (w_i, b_i): E epochs of the local optimizer from (w, b_i), on both together
    w <- w + eta_g sum_i (n_i / sum_j n_j) (w_i - w)

The layers are found by the types of the model's modules (the selector ``norm``), so GroupNorm and
LayerNorm stay, too. There is no global model, so the clients' own models are evaluated
(``evaluation.model=clients``), each after its last training; ``evaluation.clients=true`` scores w
with each client's own layers. ``strategy.personal=none`` is FedAvg.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.method import Method


class FedBN(Method):
    """FedBN (Li et al. 2021): personalised; every client keeps its normalisation layers. For
    clients whose inputs differ, such as images of several cameras.
    """

    replaces = frozenset({"personal"})
    settings = MappingProxyType({"strategy.personal": "norm", "evaluation.model": "clients"})
