"""The plain mean of the clients' models with MA-Echo's classifier: the averages of its tables.

Su, Yang, Li, Xue. Neural Networks 2023. https://arxiv.org/abs/2204.12493

All clients have the same weight; the classifier's row of a class is the mean over the clients that
hold more than one example of it, as in the released code's Average and OT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fusion.projected_layers import local_models, masked_classifier
from fedhet.strategies.round.arguments import Slots
from fedhet.strategies.statistics.class_counts import ClassCountsClient, ClassCountsServer


class MaskedMean:
    """(1 / |S|) sum_i y_i; in the classifier the mean over the clients that hold the class."""

    reads = Reads.MODELS

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to that model; replies have class counts."""
        fused = {name: values.mean(0) for name, values in local_models(params, replies).items()}
        fused |= masked_classifier(params, replies)
        return {name: fused[name] - x for name, x in params.items()}


class Average(FederatedStrategy):
    """One round, whose replies are averaged: ``Average(local_lr=.01).start(..., num_rounds=1)``."""

    def __init__(self, **slots: Unpack[Slots]) -> None:
        slots.setdefault("aggregator", MaskedMean())
        super().__init__(
            client_sides={"class_counts": ClassCountsClient()},
            server_sides={"class_counts": ClassCountsServer()},
            **slots,
        )
