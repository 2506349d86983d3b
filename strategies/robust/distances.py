"""Squared distances between the clients' vectors, which selection and geometric median read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.strategies.base import Tensors
from fedhet.strategies.robust.aggregator import Groups
from fedhet.strategies.robust.coordinates import blocks_of


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


def joint_distances(groups: Groups) -> Tensor:
    """Return the squared distances (n, n) of whole replies.

    A payload may have another scale than the update, and a client may lie in it alone: each further
    group is scaled so that its median distance is that of the first.
    """
    first, *others = (squared_distances(vectors) for vectors in groups.values())
    total, scale = first.clone(), _median(first)
    for distances in others:
        median = _median(distances)
        total += distances * (scale / median if median > 0.0 and scale > 0.0 else 1.0)
    return total


def _median(distances: Tensor) -> float:
    count = len(distances)
    pairs = distances[torch.ones(count, count).triu(1).bool()]
    return float(pairs.median()) if count > 1 else 0.0
