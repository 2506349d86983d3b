"""Aggregators: (x, replies) -> Delta. Replies come sorted by client id, so sums are repeatable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.base import Reply, Tensors


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

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate."""
        return mean_of([r.update for r in replies], [r.num_examples for r in replies])


class UniformMean:
    """Plain mean of updates, (1/|S|) sum_i u_i."""

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate."""
        return mean_of([r.update for r in replies], [1.0] * len(replies))
