"""FedPer: federated learning with personalization layers.

Arivazhagan, Aggarwal, Singh, Choudhary. 2019. https://arxiv.org/abs/1912.00818

A model is a body and a head. The body is trained as in FedAvg; each client keeps its head
(Algorithms 1, 2):

    (b_i, h_i): E epochs of the local optimizer from (b, h_i), on both together
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

The body travels, with its BatchNorm statistics. There is no global model, so the clients' own
models are evaluated (``evaluation.model=clients``), each after its last training.
``strategy.personal=none`` is FedAvg, ``all`` is Local.

FedDW's released code also averages the heads, which nothing reads, and it scores the mean of all
clients' models, including clients that have not trained yet; here they do not count.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.method import Method


class FedPer(Method):
    """FedPer (Arivazhagan et al. 2019): personalised; clients share the body, and each keeps its
    own head.
    """

    replaces = frozenset({"personal"})
    settings = MappingProxyType({"strategy.personal": "head.*", "evaluation.model": "clients"})
