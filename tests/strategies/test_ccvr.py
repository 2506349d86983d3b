"""CCVR's moments, against the pooled examples', and what its output is."""

import torch
from torch.nn import functional as F

from fedhet.strategies.ccvr import CCVR, COUNTS, PRODUCTS, SUMS, drawn, gaussians
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.round.server_model import ServerModel
from tests.strategies.labelled import Classifier, assert_same, train
from tests.strategies.sides import built


def moments(features: torch.Tensor, labels: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
    members = F.one_hot(labels, classes).double()
    products = torch.stack(
        [features[labels == c].T @ features[labels == c] for c in range(classes)]
    )
    return {COUNTS: members.sum(0), SUMS: members.T @ features, PRODUCTS: products}


def test_the_gaussians_are_those_of_everybodys_examples():
    generator = torch.Generator().manual_seed(0)
    features = 5 + torch.randn(60, 3, generator=generator, dtype=torch.float64)
    labels = torch.arange(60) % 2 * 2  # nobody holds class 1
    labels[-1] = 3  # and one example is of class 3
    parts = [moments(features[i::4], labels[i::4], 4) for i in range(4)]
    held, means, covariances = gaussians({n: sum(p[n] for p in parts) for n in parts[0]})
    assert held.tolist() == [0, 2, 3]
    for row, c in enumerate((0, 2)):
        own = features[labels == c]
        torch.testing.assert_close(means[row], own.mean(0), rtol=1e-12, atol=0)
        torch.testing.assert_close(covariances[row], own.T.cov(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(means[2], features[-1], rtol=1e-12, atol=0)
    assert covariances[2].abs().max() < 1e-12


def test_the_drawn_features_have_these_moments():
    """Correlated and of rank one less than d: mean (1, 2), covariance ((4, 2), (2, 1))."""
    mean, covariance = torch.tensor([1.0, 2.0]).double(), torch.tensor([[4.0, 2.0], [2.0, 1.0]])
    count = 5.0
    products = (count - 1) * covariance.double() + count * mean.outer(mean)
    given = {
        COUNTS: torch.tensor([0.0, count]).double(),
        SUMS: torch.stack([torch.zeros(2).double(), count * mean]),
        PRODUCTS: torch.stack([torch.zeros(2, 2).double(), products]),
    }
    features, labels = drawn(given, 20_000, torch.Generator().manual_seed(0))
    assert labels.unique().tolist() == [1]
    torch.testing.assert_close(features.mean(0), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(features.T.cov(), covariance.double(), rtol=0, atol=0.1)
    torch.testing.assert_close(features[:, 0] - 1, 2 * (features[:, 1] - 2), rtol=0, atol=1e-6)


def test_the_output_is_the_model_of_the_round_before_with_another_classifier():
    """Training has FedAvg's bits; without samples the classifier stays, too."""
    fedavg, _ = train(built(FedAvg), rounds=1, model=Classifier)
    network = ServerModel(Classifier(), (4,), 3)
    plain, calibrated = (
        train(built(CCVR, samples=n, server_model=network), rounds=2, model=Classifier)[0]
        for n in (0, 50)
    )
    assert_same(plain, fedavg)
    heads = {"head.weight", "head.bias"}
    assert {n for n in fedavg if not torch.equal(fedavg[n], calibrated[n])} == heads
