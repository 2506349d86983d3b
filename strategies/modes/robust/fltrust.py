"""FLTrust: the server trains on a few examples of its own, and trusts updates that point its way.

Cao, Fang, Liu, Gong. NDSS 2021. https://arxiv.org/abs/2012.13995

    T_i = max(0, cos(u_i, u_0)),   Delta = sum_i T_i (||u_0|| / ||u_i||) u_i / sum_i T_i

u_0 is the server's update: local training on the root set from the same model, with the recipe's
settings but without the method's halves. If no client is trusted, Delta is zero. Buffers move by
the mean with weights T_i. The root set gives no payload to compare a client's with, so methods
whose server reads payloads are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Inside, Reference
from fedhet.strategies.base import Tensors, zeros_like
from fedhet.strategies.modes.robust.aggregator import (
    BUFFERS,
    KEY,
    UPDATE,
    Groups,
    RobustAggregator,
    counted,
    weighted_mean,
)
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.round.update_diagnostics import norm
from fedhet.strategies.slots import Output

# (the model with the tensors that were sent, t) -> y_0 - x of its trained tensors
RootTraining = Callable[[nn.Module, int], dict[str, Tensor]]


class FLTrust(RobustAggregator):
    """The mean of the updates by their cosine with the server's own.

    Attributes:
        train: how the server trains; set before round 1 (server_app/root_set.py).
    """

    option = "fltrust"

    root: Count | Inside = 100
    """how many test examples the server trains on, and does not test on: a number, or a share
    below 1"""
    data: Reference | None = None
    """package.module:function that gives the root set instead: arrays (inputs, targets), a Dataset
    or a DataLoader"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.train: RootTraining | None = None

    def bind(self, server_model: ServerModel) -> None:
        """Keep the model."""
        self.server_model = server_model

    def check_method(self, payloads: Sequence[str], output: Output) -> None:
        """Refuse payloads."""
        super().check_method(payloads, output)
        if payloads:
            raise ConfigError(
                f"{KEY} FLTrust trains on the root set without the halves of methods, so it cannot "
                f"tell which clients' {', '.join(payloads)} to trust: choose another aggregator "
                "(median, krum, ...), or another method"
            )

    def combine_groups(
        self, groups: Groups, params: Tensors, round: int
    ) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
        """Return the means of the trusted updates and buffers."""
        if self.train is None:
            raise ConfigError(f"{KEY} FLTrust has no root set: set its attribute `train`")
        own = self.train(self.server_model.model, round)
        own = {name: own[name].to(value) for name, value in groups[UPDATE][0].items()}
        length = norm(own)
        lengths = [norm(update) for update in groups[UPDATE]]
        products = [_product(own, update) for update in groups[UPDATE]]
        trust = [
            max(0.0, product / (length * other)) if length * other > 0.0 else 0.0
            for product, other in zip(products, lengths, strict=True)
        ]
        total = math.fsum(trust)
        shares = [one / total if total > 0.0 else 0.0 for one in trust]
        scaled = [
            share * length / other if other > 0.0 else 0.0
            for share, other in zip(shares, lengths, strict=True)
        ]
        means = {UPDATE: weighted_mean(groups[UPDATE], scaled)} if total > 0.0 else {}
        means.setdefault(UPDATE, zeros_like(groups[UPDATE][0]))
        if BUFFERS in groups:
            means[BUFFERS] = weighted_mean(groups[BUFFERS], shares)
        return means, counted(shares)


def _product(left: Tensors, right: Tensors) -> float:
    return math.fsum(
        float(value.double().flatten() @ right[n].double().flatten()) for n, value in left.items()
    )
