"""Aggregators: (x, replies) -> Delta. Replies are sorted by client id: sums are repeatable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.strategies.base import Reply, Tensors, Weighting
from fedhet.strategies.statistics.update_diagnostics import norm


def mean_of(values: Sequence[Tensors], coefficients: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean by name; the coefficients need not sum to one."""
    total = float(sum(coefficients))
    mean = {name: torch.zeros_like(value) for name, value in values[0].items()}
    for tensors, coefficient in zip(values, coefficients, strict=True):
        for name, value in mean.items():
            value.add_(tensors[name], alpha=coefficient / total)
    return mean


class WeightedMean:
    """Mean of updates weighted by example counts, sum_i n_i u_i / sum_i n_i (FedAvg, eq. 1)."""

    weighting: Weighting = "examples"

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate."""
        return mean_of([r.update for r in replies], [r.num_examples for r in replies])


class UniformMean:
    """Plain mean of updates, (1/|S|) sum_i u_i."""

    weighting: Weighting = "clients"

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate."""
        return mean_of([r.update for r in replies], [1.0] * len(replies))


class NormMean:
    """Sum of updates, stretched to their mean norm (FedMRUR, Algorithm 1, line 15).

    With D_i the updates over all trainable shared tensors as one vector:

        (mean_i ||D_i||) sum_i D_i / ||sum_i D_i||

    Every client counts the same. Updates that cancel give zero: their sum is only rounding.
    (Fig. 2's caption has the sum of the norms; Algorithm 1, the text and Lemma 7 have the mean.)
    """

    individual = "it needs the norm of every update; take strategy/aggregator=uniform_mean"

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate."""
        mean = UniformMean()(params, replies)
        norms = [norm(r.update) for r in replies]
        mean_norm, norm_of_mean = sum(norms) / len(norms), norm(mean)
        cancelled = norm_of_mean <= torch.finfo(torch.float32).eps * mean_norm
        stretch = 0.0 if cancelled else mean_norm / norm_of_mean
        return {name: stretch * value for name, value in mean.items()}
