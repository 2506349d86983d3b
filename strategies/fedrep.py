"""FedRep: exploiting shared representations for personalized federated learning.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078

FedPer's parts, a shared body b and each client's head h_i, trained one after the other (Algorithm
1):

    h_i <- several epochs on the head, from h_i, at the received b
    b_i: the other epochs on the body, from b, at that head
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

What stays, travels and is evaluated is as in FedPer (fedper.py). A frozen tensor has no gradient,
so neither momentum nor Adam moves it. BatchNorm statistics move in both phases: both are passes in
train mode.

The paper takes many epochs for the head and one for the body, FedDW's released code 1 and 4, as the
recipe does: ``strategy.fedrep.head_epochs`` of ``local.epochs``.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.common.kinds import Count
from fedhet.strategies.method import Method


class FedRep(Method):
    """FedRep (Collins et al. 2021): personalised; every client fits its own head to the shared
    body, then the body to the head.
    """

    replaces = frozenset({"personal", "phases"})
    settings = MappingProxyType(
        {
            "strategy.personal": "head.*",
            "strategy.phases": [
                {"layers": "head.*", "epochs": "${strategy.fedrep.head_epochs}"},
                {"layers": "body.*", "epochs": None},
            ],
            "evaluation.model": "clients",
        }
    )

    head_epochs: Count = 1
    """how many of local.epochs train the head, first; the others train the body (the paper: all but
    one; FedDW's code: 1 of 5)"""
