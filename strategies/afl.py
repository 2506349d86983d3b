"""AFL: a single-round analytic approach for federated learning with pre-trained models.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang. CVPR 2025. https://arxiv.org/abs/2405.16240

The body stays as it is, and the classifier is the least-squares fit of the one-hot labels Y to the
features Z (n, d) of everybody's examples, with no round of gradients. With Z_i, Y_i of client i:

    W = (sum_i Z_i^T Z_i)^-1 sum_i Z_i^T Y_i

The paper's clients send W_i and C_i = Z_i^T Z_i + gamma I. The server merges them pairwise (the
absolute aggregation law, eq. 9 to 11) and frees the result from gamma (the RI process, eq. 16).
Here they send the two sums, which are as many numbers, and the server solves once: the same W but
for rounding, for any gamma, however the examples are divided among the clients. ``ridge`` adds a
penalty to the sum; 0 is the paper, with the pseudoinverse where features depend on each other. The
classifier has no bias: its bias is set to 0.

d^2 + C d floats of 64 bits go up. The features are those of the received model, so give it a
pretrained body (``initial_model``, ``task.model`` of torchvision or Hugging Face). The clients
train the classifier alone, which the output replaces: the body is never moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.functional import one_hot

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import (
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Tensors,
)
from fedhet.strategies.components.fitted_classifier import FittedClassifier, KeptSums
from fedhet.strategies.components.tensor_selection import linear_classifier
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

CORRELATIONS = "feature_correlations"
PRODUCTS, LABELS = "products", "labels"
_BATCH = 500  # examples at once; nothing depends on it but speed


class AFLClient(ClientSide):
    """Sends Z^T Z and Y^T Z of the received model's features, in eval mode."""

    by_class = True
    sends = per_example = frozenset({CORRELATIONS})
    dtypes = MappingProxyType({CORRELATIONS: torch.float64})

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier that is not linear."""
        linear_classifier(model, "AFL computes")

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Send products (d, d) and labels (C, d)."""
        found = []
        for inputs, labels in context.data.batches(_BATCH, generator=None, train=False):
            features = context.global_model(inputs)[0].double()
            members = one_hot(labels, context.num_classes).double()
            found.append((features.T @ features, members.T @ features))
        products, sums = (torch.stack(parts).sum(0) for parts in zip(*found, strict=True))
        return {CORRELATIONS: {PRODUCTS: products, LABELS: sums}}


def _shapes(classes: int, width: int) -> dict[str, tuple[int, ...]]:
    return {PRODUCTS: (width, width), LABELS: (classes, width)}


class LeastSquares:
    """Sets the classifier to the least-squares fit."""

    def __init__(self, ridge: float) -> None:
        self.ridge = ridge

    @torch.no_grad()
    def __call__(self, sums: Tensors, head: nn.Linear) -> None:
        """Overwrite ``head``."""
        products = sums[PRODUCTS].double()
        products = products + self.ridge * torch.eye(len(products), dtype=torch.float64)
        inverse = torch.linalg.pinv(products, hermitian=True)
        head.weight.copy_(sums[LABELS].double() @ inverse)
        if head.bias is not None:
            head.bias.zero_()


class AFL(Method):
    """AFL (He et al. 2025): one round without gradients; the classifier is least squares on all
    clients' features, the same for any partition. For a pretrained body.
    """

    replaces = frozenset({"output", "phases"})
    settings = MappingProxyType(
        {
            "rounds": 1,
            "local.epochs": 1,
            "strategy.phases": [{"layers": "head.*", "epochs": None}],
        }
    )
    requires = MappingProxyType({"strategy.personal": "none", "strategy.output": None})

    ridge: NotNegative = 0.0
    """added to the diagonal of the features' products; 0: least squares"""

    def parts(self) -> Parts:
        """Gather the sums, and fit the output's classifier."""
        sums = KeptSums(CORRELATIONS, _shapes)
        return Parts(
            client_sides={"afl": AFLClient()},
            server_sides={"afl": sums},
            output=FittedClassifier(sums, LeastSquares(self.ridge)),
        )
