"""Aggregators that read the mean of the updates: (x, sum of the replies) -> Delta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedhet.common.configured import Option
from fedhet.strategies.base import Reads, ReplySum, Tensors, Weighting
from fedhet.strategies.round.update_diagnostics import norm


def mean_of(values: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the plain mean by name."""
    mean = {name: torch.zeros_like(value) for name, value in values[0].items()}
    for tensors in values:
        for name, value in mean.items():
            value.add_(tensors[name], alpha=1.0 / len(values))
    return mean


class WeightedMean(Option):
    """Mean of updates weighted by example counts, sum_i n_i u_i / sum_i n_i (FedAvg, eq. 1)."""

    group = "strategy/aggregator"
    option = "weighted_mean"
    weighting: ClassVar[Weighting] = "examples"

    def __call__(self, params: Tensors, total: ReplySum) -> dict[str, Tensor]:
        """Return the aggregate."""
        return dict(total.update)


class UniformMean(WeightedMean):
    """Plain mean of updates, (1/|S|) sum_i u_i."""

    option = "uniform_mean"
    weighting: ClassVar[Weighting] = "clients"


class NormMean(Option):
    """Sum of updates, stretched to their mean norm (FedMRUR, Algorithm 1, line 15).

    With D_i the updates over all trainable shared tensors as one vector:

        (mean_i ||D_i||) sum_i D_i / ||sum_i D_i||

    Every client counts the same. Updates that cancel give zero: their sum is only rounding.
    (Fig. 2's caption has the sum of the norms; Algorithm 1, the text and Lemma 7 have the mean.)
    """

    group = "strategy/aggregator"
    option = "norm_mean"
    weighting: ClassVar[Weighting] = "clients"
    reads = Reads.NORMS

    def __call__(self, params: Tensors, total: ReplySum) -> dict[str, Tensor]:
        """Return the aggregate."""
        norms = [reply.norm for reply in total.replies]
        mean_norm, norm_of_mean = sum(norms) / len(norms), norm(total.update)
        cancelled = norm_of_mean <= torch.finfo(torch.float32).eps * mean_norm
        stretch = 0.0 if cancelled else mean_norm / norm_of_mean
        return {name: stretch * value for name, value in total.update.items()}
