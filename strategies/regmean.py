"""RegMean: dataless knowledge fusion by merging weights of language models.

Jin, Ren, Preotiuc-Pietro, Cheng. ICLR 2023. https://arxiv.org/abs/2212.09849

A layer of the fused model approximates each client's outputs on that client's inputs. In least
squares that has a closed form (eq. 2; here W multiplies from the left, W (out, d)):

    W = (sum_i n_i W_i A_i) (sum_i n_i A_i)^-1,     A_i = X_i^T X_i / n_i

where the off-diagonal entries of A_i are multiplied by ``shrinkage`` (the paper: .9, .1 for T5), so
that the sum has an inverse. shrinkage = 1 is the bare form (with the pseudoinverse); 0 weights each
input separately. The classifier is fused like any other layer, or by MA-Echo's mask. Tensors that
belong to no layer are averaged.

A_i comes from MA-Echo's projections (fusion/projections.py), P_i = A_i (A_i + z_i I)^-1 = U diag(p)
U^T: A_i = U diag(z p / (1 - p)) U^T, exact for projections of full rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from fedhet.common.kinds import Share
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.fusion.projections import (
    PROJECTIONS,
    Layer,
    Projections,
    local_models,
    masked_classifier,
    projected_layers,
    read_layer,
    unflattened,
)
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts


def regression_mean(layer: Layer, shrinkage: float = 0.9) -> Tensor:
    """Return eq. 2 (out, d), computed in float64; ValueError for damped projections."""
    if not layer.scales.all():
        raise ValueError(
            f"the projections of {layer.name} hold no second moments: RegMean needs "
            "strategy.projections.form=ridge"
        )
    kept = layer.values.double().clamp_max(1.0 - 1e-7)
    moments = layer.scales.double()[:, None] * kept / (1.0 - kept)
    width = layer.bases.shape[1]
    total = torch.zeros(width, width, dtype=torch.float64, device=layer.local.device)
    aims = torch.zeros_like(layer.local[0], dtype=torch.float64)
    for i, local in enumerate(layer.local):
        base = layer.bases[i].double()
        moment = layer.sizes[i] * (base * moments[i]) @ base.T
        moment = shrinkage * moment + (1.0 - shrinkage) * torch.diag(moment.diagonal())
        total += moment
        aims += local.double() @ moment
    if not total.any():  # no client's model calls this layer
        return layer.local.mean(0)
    # Directions that no client's inputs have get weight 0. A_i travelled in float32, so smaller
    # entries are rounding errors, and their inverse would exceed everything else.
    tolerance = torch.finfo(torch.float32).eps
    inverse: Tensor = torch.linalg.pinv(total, rtol=tolerance, hermitian=True)
    return (aims @ inverse).to(layer.local.dtype)


Classifier = Literal["fused", "masked"]


class RegressionMean:
    """RegMean's aggregator; the arguments are :class:`RegMean`'s."""

    reads = Reads.MODELS

    def __init__(self, shrinkage: float, classifier: Classifier) -> None:
        self.shrinkage, self.classifier = shrinkage, classifier

    @torch.no_grad()
    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to the fused model."""
        local = local_models(params, replies)
        fused = {name: values.mean(0) for name, values in local.items()}
        names = projected_layers(replies)
        if self.classifier == "fused":
            names = list(replies[0].payloads[PROJECTIONS])
        for name in names:
            layer = read_layer(name, local, replies, torch.device("cpu"))
            fused |= unflattened(name, regression_mean(layer, self.shrinkage), params)
        if self.classifier == "masked":
            fused |= masked_classifier(params, replies)
        return {name: fused[name] - x for name, x in params.items()}


class RegMean(Method):
    """RegMean (Jin et al. 2023): one round; fuses linear layers by regression on all clients'
    inputs, in closed form.
    """

    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None, "strategy.projections.form": "ridge"})

    shrinkage: Share = 0.9
    """factor on the off-diagonal entries of the inputs' second moments"""
    classifier: Classifier = "fused"
    """fused (as other layers) | masked (as MA-Echo's)"""
    projections: Projections = Projections()

    def parts(self) -> Parts:
        """Fuse the models of clients that send projections."""
        return Parts(aggregator=RegressionMean(self.shrinkage, self.classifier))
