"""Update diagnostics: how far the clients' updates agree, as scalars of every round.

With D_i = y_i - x the update of client i in S, over all trainable shared tensors as one vector:

    norm_ratio       ||mean_i D_i|| / mean_i ||D_i||, FedMRUR's 1 / d_t (its Theorem 1): 1 where all
                     point the same way, 1 / sqrt(|S|) where they are orthogonal and equally long
    update_cosine    the mean of cos(D_i, D_j) over all pairs i != j: 0 where they are orthogonal
    drift_diversity  sum_i ||D_i||^2 / ||sum_i D_i||^2 (FedPVR, Definition 1): 1 / |S| where all are
                     equal, 1 where they are orthogonal
    update_norm      mean_i ||D_i||
    step_norm        ||Delta||, of the aggregate

All means are plain. An undefined figure is left out: the cosine of a single client, a quotient by
a zero norm. :func:`diagnose_layers` has drift_diversity and update_norm by tensor (FedPVR, Figures
2, 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.strategies.base import Reply, Tensors


def norm(tensors: Tensors) -> float:
    """Return the L2 norm of all tensors as one vector; of none it is 0."""
    return 0.0 if not tensors else float(_norms(list(tensors.values())).norm())


@torch.no_grad()
def diagnose(replies: Sequence[Reply], update: Tensors) -> dict[str, float]:
    """Return the figures above of a round's replies, and of Delta; none where nothing is shared."""
    names = list(replies[0].update)
    if not names:
        return {}
    norms = [norm(reply.update) for reply in replies]
    total = [torch.zeros_like(replies[0].update[name]) for name in names]
    directions = [torch.zeros_like(value) for value in total]  # the sum of D_i / ||D_i||
    for reply, length in zip(replies, norms, strict=True):
        values = [reply.update[name] for name in names]
        torch._foreach_add_(total, values)
        if length > 0.0:
            torch._foreach_add_(directions, values, alpha=1.0 / length)
    size, length_of_sum = len(norms), float(_norms(total).norm())
    figures: dict[str, float] = {}
    if sum(norms) > 0.0:
        figures["norm_ratio"] = length_of_sum / sum(norms)
    if length_of_sum > 0.0:
        squares = math.fsum(length**2 for length in norms)
        figures["drift_diversity"] = squares / length_of_sum**2
    if size > 1 and min(norms) > 0.0:
        # ||sum of unit vectors||^2 is |S| and twice the cosine of every pair
        square = float(_norms(directions).norm()) ** 2
        figures["update_cosine"] = (square - size) / (size * (size - 1))
    return figures | {"update_norm": sum(norms) / size, "step_norm": norm(update)}


@torch.no_grad()
def diagnose_layers(replies: Sequence[Reply], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return "drift_diversity" and "update_norm" of each tensor on its own, by its name."""
    norms = torch.stack([_norms([reply.update[name] for name in names]) for reply in replies])
    total = [torch.zeros_like(replies[0].update[name]) for name in names]
    for reply in replies:
        torch._foreach_add_(total, [reply.update[name] for name in names])
    squares = norms.square().sum(dim=0).tolist()
    figures = zip(names, squares, _norms(total).square().tolist(), strict=True)
    return {
        "drift_diversity": {name: each / whole for name, each, whole in figures if whole > 0.0},
        "update_norm": dict(zip(names, norms.mean(dim=0).tolist(), strict=True)),
    }


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, (n,) in double precision."""
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def step_norm(replies: Sequence[Reply], update: Tensors) -> dict[str, float]:
    """Return all that can be said where single replies are not known: the norm of Delta."""
    return {"step_norm": norm(update)} if update else {}
