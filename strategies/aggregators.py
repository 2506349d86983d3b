"""Aggregators: (x, replies) -> Delta. Replies come sorted by client id, so sums are repeatable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.base import Reply, Tensors


def mean_of(values: Sequence[Tensors], coefficients: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean by name; the coefficients need not sum to one."""
    total = float(sum(coefficients))
    shares = [coefficient / total for coefficient in coefficients]
    return {
        name: torch.stack([share * v[name] for share, v in zip(shares, values, strict=True)]).sum(0)
        for name in values[0]
    }


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
