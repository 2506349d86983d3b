"""Squared distances between the clients' vectors, which selection and geometric median read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.strategies.base import Tensors
from fedhet.strategies.modes.robust.aggregator import Groups
from fedhet.strategies.modes.robust.coordinates import blocks_of


def squared_distances(vectors: Sequence[Tensors]) -> Tensor:
    """Return ||v_i - v_j||^2 (n, n) in double precision, all tensors as one vector."""
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for name in vectors[0]:
        for _, values in blocks_of(vectors, name):
            values = values.double()
            products += (values @ values.T).cpu()
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
