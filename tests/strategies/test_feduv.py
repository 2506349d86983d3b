"""FedUV: its two terms by hand and by brute force, and the batches that have none."""

import pytest
import torch
from torch.nn.functional import one_hot

from fedhet.strategies.base import Step
from fedhet.strategies.feduv import (
    FedUV,
    crowding,
    median_apart,
    missing_variance,
    squared_distances,
)
from tests.strategies.sides import client_side


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def step(features, logits):
    return Step({}, features, torch.zeros(len(features), dtype=torch.int64), features, logits, None)


@pytest.mark.parametrize("size", [4, 5, 8])  # 6, 10 and 28 pairs: even counts, whose median is one
@pytest.mark.parametrize("doubled", [False, True])
def test_feduv_crowding_and_its_gradient_by_brute_force(size, doubled):
    """The definition over pairs i < j, with PyTorch's pdist and median. It has no scale."""
    features = draw(size, 3)
    if doubled:
        features[1] = features[0]
    found, expected = features.clone().requires_grad_(), features.clone().requires_grad_()
    pairs = torch.pdist(expected).square()
    uniformity = torch.exp(-pairs / pairs[pairs > 0].median()).mean()
    torch.testing.assert_close(crowding(found), uniformity)
    torch.testing.assert_close(crowding(3 * found), uniformity)
    crowding(found).backward()
    uniformity.backward()
    torch.testing.assert_close(found.grad, expected.grad)
    single = features.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        penalty = crowding(single)
    penalty.backward()
    torch.testing.assert_close(single.grad.double(), expected.grad, atol=1e-5, rtol=1e-4)


def test_the_median_of_feduv_shares_its_gradient_among_ties():
    """At 0, 1, 2, 3 the distances are 1, 1, 1, 4, 4, 9: a third for each pair of neighbours."""
    distances = torch.tensor([1.0, 4.0, 9.0, 1.0, 4.0, 1.0, 0.0], requires_grad=True)
    median = median_apart(distances)
    median.backward()
    assert median.item() == 1.0
    assert torch.equal(distances.grad, torch.tensor([1.0, 0, 0, 1, 0, 1, 0]) / 3)


def test_far_or_close_examples_of_feduv_lose_nothing():
    """At 2^16, where a squared length in float32 has steps of 512."""
    near = torch.tensor([[0.0, 0.0], [0.25, 0.0], [0.25, 0.0], [1.0, 2.0]], requires_grad=True)
    far = (2.0**16 + near.detach()).requires_grad_()
    torch.testing.assert_close(squared_distances(far), squared_distances(near))
    crowding(near).backward()
    crowding(far).backward()
    torch.testing.assert_close(far.grad, near.grad, atol=1e-4, rtol=0)
    first = torch.tensor([1.0, 1.0, 1.0 + 2**-12, -3.0])  # a square below the rounding of 2
    found = squared_distances(first[:, None] * torch.tensor([[1.0, 0.0, 0.0]]))
    assert found[0] == 0.0
    assert found[1].item() == pytest.approx(2.0**-24, rel=1e-3)


def test_feduv_missing_variance_by_hand():
    """Sure of one class, then of another, std sqrt(1 / 3): the other 8 of 10 miss all."""
    for classes in (2, 10, 100):
        gamma = torch.eye(classes).std(dim=0).mean().item()
        assert missing_variance(torch.zeros(7, classes)).item() == pytest.approx(gamma)
        assert missing_variance(100 * torch.eye(classes)).item() == pytest.approx(0, abs=1e-6)
    logits = 100 * one_hot(torch.tensor([0, 1, 0, 1]), 10).float()
    assert missing_variance(logits).item() == pytest.approx(0.8 * 10**-0.5)


def test_the_penalty_is_the_weighted_sum():
    """One example has none; equal examples have one without gradient."""
    features, logits = draw(6, 3), draw(6, 4)
    expected = 2.5 * missing_variance(logits) + 0.5 * crowding(features)
    torch.testing.assert_close(client_side(FedUV).penalty(step(features, logits)), expected)
    alone = client_side(FedUV, uniformity=0.0).penalty(step(features, logits))
    torch.testing.assert_close(alone, 2.5 * missing_variance(logits))
    assert client_side(FedUV).penalty(step(draw(1, 3), draw(1, 4))) is None  # one example
    features, logits = (torch.ones(5, 3).mul(0.1).requires_grad_() for _ in range(2))
    penalty = client_side(FedUV).penalty(step(features, logits))
    assert penalty.item() == pytest.approx(2.5 * 3**-0.5 + 0.5)
    penalty.backward()
    assert features.grad.abs().max() < 1e-6
    assert logits.grad.abs().max() == 0.0
