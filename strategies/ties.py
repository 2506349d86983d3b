"""TIES-Merging: resolving interference when merging models.

Yadav, Tam, Choshen, Raffel, Bansal. NeurIPS 2023. https://arxiv.org/abs/2306.01708

The clients' updates tau_i = y_i - x, each as one vector, are merged in three steps (Algorithm 1):

    trim        of tau_i stay the ``keep`` share of the numbers that are largest in magnitude
    elect       gamma = sign(sum_i tau_i)
    mean        tau = the mean over those i whose number has the sign gamma, 0 where there is none

and the merged model is x + scale tau. keep = 1 and equal signs are the plain mean. Where the
trimmed numbers cancel exactly, gamma is 0 and so is tau; the released code gives such a number the
sign that most others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import Positive, ShareAboveZero
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts


def trimmed(update: Tensor, keep: float) -> Tensor:
    """Return a vector (P,) with zeros in place of all but the largest round(keep P) numbers."""
    kept = max(1, round(keep * len(update)))
    chosen = update.abs().topk(kept).indices
    return torch.zeros_like(update).index_copy(0, chosen, update[chosen])


def elected_mean(updates: Tensor) -> Tensor:
    """Return the mean (P,) of the numbers of (M, P) that have the sign of their sum."""
    agreeing = updates.sign() * updates.sum(0).sign() > 0
    return (updates * agreeing).sum(0) / agreeing.sum(0).clamp_min(1)


class TrimmedElectedMean:
    """The aggregator of TIES."""

    reads = Reads.MODELS

    def __init__(self, keep: float, scale: float) -> None:
        self.keep, self.scale = keep, scale

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to the merged model."""
        vectors = [torch.cat([r.update[name].flatten() for name in params]) for r in replies]
        merged = self.scale * elected_mean(torch.stack([trimmed(v, self.keep) for v in vectors]))
        parts = zip(
            params.items(), torch.split(merged, [x.numel() for x in params.values()]), strict=True
        )
        return {name: part.view_as(x).to(x.dtype) for (name, x), part in parts}


class TIES(Method):
    """TIES-Merging (Yadav et al. 2023): one round; the mean of the large numbers of the clients'
    updates whose signs agree. Merging of models that were fine-tuned from one.
    """

    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None})

    keep: ShareAboveZero = 0.2
    """share of each update's numbers that stay"""
    scale: Positive = 1.0
    """factor of the merged update"""

    def parts(self) -> Parts:
        """Merge the updates."""
        return Parts(aggregator=TrimmedElectedMean(self.keep, self.scale))
