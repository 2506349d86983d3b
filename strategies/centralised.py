"""Centralised: one client that holds all examples, the accuracy that heterogeneity costs from.

Plain training on the whole training set, in rounds so that it is seen beside the others:

    x <- E epochs of the local optimizer from x, on all examples

With one client FedAvg is that: the mean over one model is the model. The optimizer starts
afresh every round; with plain SGD R rounds of E epochs are R E epochs at one go. The recipe needs
``clients=1``.
"""

from __future__ import annotations

from typing import Unpack

from strategies.round.federated import FederatedStrategy, Slots
from strategies.round.registration import FederationConfig


class Centralised(FederatedStrategy):
    """FedAvg's server for one client."""

    def __init__(self, **slots: Unpack[Slots]) -> None:
        slots.setdefault("federation", FederationConfig(num_clients=1))
        super().__init__(**slots)
