"""Median and trimmed mean of every coordinate; distances between the clients' vectors.

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
from fedhet.strategies.modes.robust.aggregator import Combined, Groups, RobustAggregator

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


def squared_distances(vectors: Sequence[Tensors]) -> Tensor:
    """Return ||v_i - v_j||^2 (n, n) in double precision, all tensors as one vector."""
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for name in vectors[0]:
        for _, values in blocks_of(vectors, name):
            values = values.double()
            products += (values @ values.T).cpu()
    products = (products + products.T) / 2  # BLAS may round (i, j) and (j, i) differently
    squares = products.diagonal()
    found = (squares[:, None] + squares[None, :] - 2 * products).clamp_min_(0.0)
    return found.fill_diagonal_(0.0)


def joint_distances(groups: Groups, attackers: int) -> Tensor:
    """Return the squared distances (n, n) between whole replies; up to f may be hostile.  A payload
    may have another scale than the update, and a client may lie only in a payload. So each further
    group is scaled to the first group's typical distance.
    """
    first, *others = (squared_distances(vectors) for vectors in groups.values())
    total, scale = first.clone(), _typical(first, attackers)
    for distances in others:
        typical = _typical(distances, attackers)
        total += distances * (scale / typical if typical > 0.0 and scale > 0.0 else 1.0)
    return total


def _typical(distances: Tensor, attackers: int) -> float:
    """Return the k-th smallest distance of two clients, k = (n - f)(n - f - 1) / 2.

    The n - f honest clients have k pairs, so this is at most the largest distance of two of them.
    If f is near n / 2, a hostile pair has the median distance, and a lie would set its own scale.
    """
    count, honest = len(distances), len(distances) - attackers
    if honest < 2:
        return 0.0
    pairs = distances[torch.ones(count, count).triu(1).bool()]
    return float(pairs.kthvalue(honest * (honest - 1) // 2).values)
