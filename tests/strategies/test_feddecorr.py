"""FedDecorr's term, against numbers worked out by hand."""

import pytest
import torch

from fedhet.strategies.base import Step
from fedhet.strategies.feddecorr import FedDecorr, correlation
from tests.strategies.sides import client_side


def test_the_term_by_hand():
    """Features (1, 2, 3), (2, 4, 6) and (1, 0, 1): K_12 = 1 and K_13 = K_23 = 0.

    (B - 1) K_12 = 2, so the sum over both orders is 8, over d (d - 1) B = 18.
    """
    features = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 0.0], [3.0, 6.0, 1.0]]).double()
    assert float(correlation(features)) == pytest.approx(8 / 18, rel=1e-7)


def test_one_example_or_one_dimension_has_no_term():
    side, nothing = client_side(FedDecorr), torch.zeros(1)
    for shape in ((1, 3), (3, 1)):
        step = Step({}, nothing, nothing, torch.ones(shape), nothing, None)
        assert side.penalty(step) is None


def test_equal_features_have_a_finite_gradient():
    features = torch.ones(4, 3, requires_grad=True)
    correlation(features).backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
