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

from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import Tensors
from fedhet.strategies.components.fitted_classifier import FeatureSums, FittedClassifier, KeptSums
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

CORRELATIONS = "feature_correlations"
PRODUCTS, LABELS = "products", "labels"


def correlations(features: Tensor, members: Tensor) -> dict[str, Tensor]:
    """Return Z^T Z (d, d) and Y^T Z (C, d)."""
    return {PRODUCTS: features.T @ features, LABELS: members.T @ features}


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
            client_sides={"afl": FeatureSums(CORRELATIONS, "AFL computes", correlations)},
            server_sides={"afl": sums},
            output=FittedClassifier(sums, LeastSquares(self.ridge)),
        )
