"""Median and trimmed mean of every coordinate.

Yin, Chen, Ramchandran, Bartlett. ICML 2018. https://arxiv.org/abs/1803.01498

Every client counts the same. Payloads have the same rule. It treats the sum and the count of a
class separately, so the median loses a class that fewer than half of the clients hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedhet.strategies.base import Tensors
from fedhet.strategies.modes.robust.aggregator import Combined, RobustAggregator

_BLOCK = 1 << 18  # coordinates at once
Trim = Annotated[float, Field(ge=0, lt=0.5)]


class Median(RobustAggregator):
    """The median of every coordinate; with an even number of clients, the mean of the middle
    two."""

    option = "median"

    def mean(self, group: str, vectors: Sequence[Tensors]) -> Combined:
        """Return it."""
        count = len(vectors)
        return mean_of_ranks(vectors, (count - 1) // 2, count // 2 + 1)


class TrimmedMean(RobustAggregator):
    """The mean of every coordinate without its k smallest and k largest values."""

    option = "trimmed_mean"

    trim: Trim = 0.2
    """beta, the share of clients to cut at each end: k = floor(beta n)"""

    def mean(self, group: str, vectors: Sequence[Tensors]) -> Combined:
        """Return it."""
        count = len(vectors)
        cut = int(self.trim * count + 1e-9)  # .29 * 100 is 29, up to rounding
        return mean_of_ranks(vectors, cut, count - cut)


def blocks_of(vectors: Sequence[Tensors], name: str) -> Iterator[tuple[slice, Tensor]]:
    """Yield a tensor of all vectors in blocks (n, numbers) of coordinates, with their place."""
    flat = [vector[name].reshape(-1) for vector in vectors]
    for start in range(0, len(flat[0]), _BLOCK):
        block = slice(start, start + _BLOCK)
        yield block, torch.stack([values[block] for values in flat])


def mean_of_ranks(vectors: Sequence[Tensors], low: int, high: int) -> Combined:
    """Return the mean of the values of rank ``low`` to ``high`` - 1 at every coordinate.

    A client counts by the share of coordinates at which its value is within what is kept, over the
    mean of that share.
    """
    found = {}
    within = torch.zeros(len(vectors), dtype=torch.float64)
    for name, like in vectors[0].items():
        mean = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        for block, values in blocks_of(vectors, name):
            kept = values.sort(dim=0).values[low:high]
            mean[block] = kept.double().mean(0).to(like.dtype)
            within += ((values >= kept[0]) & (values <= kept[-1])).sum(1).double().cpu()
        found[name] = mean.reshape(like.shape)
    average = float(within.mean())
    shares = within / average if average > 0 else torch.ones_like(within)
    return found, shares.clamp_max(1.0).tolist()
