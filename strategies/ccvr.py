"""CCVR: no fear of heterogeneity: classifier calibration for federated learning with non-IID data.

Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021. https://arxiv.org/abs/2106.05001

Under label skew the classifier is biased most. So the server trains it again, on features drawn
from a Gaussian of each class (Algorithm 1). With z the features of the received model x, in eval
mode and without augmentation, a client sends by class c

    n_ic,   sum z,   sum z z^T                                   over its examples, in float64

and the server takes mean and unbiased covariance of everybody's examples (eq. 3 and 4, exactly):

    mu_c = sum z / n_c,   Sigma_c = (sum z z^T - n_c mu_c mu_c^T) / (n_c - 1)

It draws ``samples`` features of each class that somebody holds, and trains x's classifier on them
with SGD. The round's output is x as it was sent, with that classifier; training goes on from
FedAvg's new x, with the same bits as FedAvg's. So the output is that of the round before, whose
features are known; ``samples = 0`` is that x itself. The paper calibrates once, after training; so
does one round from a stored model (``initial_model``).

Fed-CCVR and fluke, code of others, compute the same from the clients' means and covariances, but
let these divide by n_ic, for classes with one example; with n_ic - 1 the results are equal.
That is what these equations were held against: the paper's text was not at hand.

C (d^2 + d + 1) floats of 64 bits go up in every round. A class with one example has that example's
features as its mean and no covariance. The paper's variant with Tukey's transform is left out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedhet.common.configured import Key
from fedhet.common.kinds import Count, Positive, Seed, Share, Whole
from fedhet.strategies.base import Tensors
from fedhet.strategies.components.fitted_classifier import FeatureSums, FittedClassifier, KeptSums
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

MOMENTS = "feature_moments"
COUNTS, SUMS, PRODUCTS = "counts", "sums", "products"


def class_moments(features: Tensor, members: Tensor) -> dict[str, Tensor]:
    """Return, by class, counts (C,), sums (C, d) and products (C, d, d)."""
    products = torch.einsum("bc,bi,bj->cij", members, features, features)
    return {COUNTS: members.sum(0), SUMS: members.T @ features, PRODUCTS: products}


def _shapes(classes: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        COUNTS: (classes,),
        SUMS: (classes, width),
        PRODUCTS: (classes, width, width),
    }


class ClassifierCalibration:
    """Trains the classifier again, on drawn features."""

    def __init__(self, method: CCVR) -> None:
        self.how = method

    def __call__(self, moments: Tensors, head: nn.Linear) -> None:
        """Train ``head``."""
        how = self.how
        if how.samples == 0:
            return
        generator = torch.Generator().manual_seed(how.seed)
        drawn_features, labels = drawn(moments, how.samples, generator)
        features = drawn_features.to(head.weight.dtype)
        head.requires_grad_(True)
        optimizer = SGD(momentum=how.momentum)
        optimizer.start(dict(head.named_parameters()), how.lr)
        for _ in range(how.steps):
            chosen = torch.randint(len(labels), (how.batch_size,), generator=generator)
            head.zero_grad()
            with torch.enable_grad():
                loss = cross_entropy(head(features[chosen]), labels[chosen])
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.move()


def gaussians(moments: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return the held classes (H,), their means (H, d) and covariances (H, d, d), from the sums."""
    held = (moments[COUNTS] > 0).nonzero().flatten()
    counts = moments[COUNTS][held].double()[:, None]
    means = moments[SUMS][held].double() / counts
    squares = counts[..., None] * means[:, :, None] * means[:, None, :]
    spread = moments[PRODUCTS][held].double() - squares
    return held, means, spread / (counts[..., None] - 1).clamp_min(1)


def drawn(moments: Tensors, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return features (H samples, d) and labels: as many of every class that somebody holds."""
    held, means, covariances = gaussians(moments)
    values, vectors = torch.linalg.eigh(covariances)
    roots = vectors * values.clamp_min(0).sqrt()[:, None, :]  # root root^T = Sigma
    noise = torch.randn(
        len(held), samples, means.shape[1], generator=generator, dtype=torch.float64
    )
    features = means[:, None] + noise @ roots.mT
    return features.flatten(0, 1), held.repeat_interleave(samples)


class CCVR(Method):
    """CCVR (Luo et al. 2021): evaluates FedAvg's model with a classifier that the server trains
    again on Gaussian features of all classes; against label skew.
    """

    replaces = frozenset({"output"})
    requires = MappingProxyType({"strategy.personal": "none", "strategy.output": None})

    samples: Whole = 200
    """features drawn of each class; 0: the classifier stays"""
    steps: Count = 300
    """steps of the classifier"""
    batch_size: Count = 64
    """features in a step"""
    lr: Positive = 0.01
    """step size of the classifier (SGD)"""
    momentum: Share = 0.9
    """momentum of the classifier"""
    seed: Annotated[Seed, Key("seed")] = 0

    def parts(self) -> Parts:
        """Gather the moments, and calibrate the output."""
        sums = KeptSums(MOMENTS, _shapes)
        return Parts(
            client_sides={"ccvr": FeatureSums(MOMENTS, "CCVR trains again", class_moments)},
            server_sides={"ccvr": sums},
            output=FittedClassifier(sums, ClassifierCalibration(self)),
        )
