"""OT fusion: the mean of the clients' models, aligned by optimal transport.

Singh, Jaggi. "Model fusion via optimal transport". NeurIPS 2020. https://arxiv.org/abs/1910.05653

fusion/neuron_alignment.py puts all clients' neurons into the first client's order; strategies/
average.py averages the aligned models, as in MA-Echo's baseline OT.
"""

from __future__ import annotations

from typing import Unpack

from fedhet.strategies.average import MaskedMean
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fusion.layer_chain import Chain, ChainServer
from fedhet.strategies.fusion.neuron_alignment import Alignment
from fedhet.strategies.round.arguments import Slots
from fedhet.strategies.statistics.class_counts import ClassCountsClient, ClassCountsServer


class OTFusion(FederatedStrategy):
    """One round, whose aligned replies are averaged: ``OTFusion(local_lr=.01).start(...)``."""

    def __init__(self, **slots: Unpack[Slots]) -> None:
        slots.setdefault("aggregator", MaskedMean())
        slots.setdefault("transforms", [Alignment()])
        super().__init__(
            client_sides={"chain": Chain(), "class_counts": ClassCountsClient()},
            server_sides={"chain": ChainServer(), "class_counts": ClassCountsServer()},
            **slots,
        )
