"""LG-FedAvg: local representations, a global classifier.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think locally, act globally:
federated learning with local and global representations. 2020. https://arxiv.org/abs/2001.01523

FedPer the other way round: each client keeps its body b_i, and the head h is trained as in FedAvg:

    (b_i, h_i): E epochs of the local optimizer from (b_i, h), on both together
    h <- h + eta_g sum_i (n_i / sum_j n_j) (h_i - h)

The body stays at the client, with its BatchNorm statistics; all clients begin with the run's
initial body. The clients' own models are evaluated (``evaluation.model=clients``), each after its
last training.

The paper's experiments train FedAvg on the whole model first, and then go on in this way:
``strategy=fedavg results_dir=first``, then ``strategy=lg_fedavg initial_model.path=first``.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.method import Method


class LGFedAvg(Method):
    """LG-FedAvg (Liang et al. 2020): personalised; clients share the head, and each keeps its own
    body.
    """

    name = "lg_fedavg"
    replaces = frozenset({"personal"})
    settings = MappingProxyType({"strategy.personal": "body.*", "evaluation.model": "clients"})
