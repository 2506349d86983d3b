"""Eq. 6 of MA-Echo: optimality conditions and closed forms."""

import pytest
import torch
from cvxopt import solvers

from fedhet.strategies.fusion.maecho_iterates import min_norm_weights
from tests.strategies.fusion.test_projections import draw


def gram_of(clients: int, seed: int) -> torch.Tensor:
    scales = torch.linspace(0.1, 1.0, clients)[:, None]
    vectors = ((draw(clients, 3 * clients, seed=seed) + 0.5 * draw(1, 1, seed=9)) * scales).double()
    return vectors @ vectors.T


@pytest.mark.parametrize("clients", [2, 3, 5, 20, 50])
@pytest.mark.parametrize("share", [1.2, 2.0, 10.0])
def test_no_weight_can_be_moved_to_shorten_the_sum(clients, share):
    for seed in range(3):
        gram, cap = gram_of(clients, seed), min(1.0, share / clients)
        alpha = min_norm_weights(gram, cap)
        assert alpha.sum().item() == pytest.approx(1.0, abs=1e-9)
        assert alpha.min() >= 0.0
        assert alpha.max() <= cap + 1e-9
        slope = gram @ alpha / gram.diagonal().mean()
        may_grow, may_give = alpha < cap - 1e-6, alpha > 1e-6
        if may_grow.any() and may_give.any():
            assert slope[may_give].max() - slope[may_grow].min() <= 1e-6


def test_orthogonal_and_equal_vectors_by_hand():
    """Of lengths 1 and 2: (.8, .2); with C = .6, (.6, .4). (1, 0) twice and (0, 1): .25 and .5."""
    gram = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    for scale, cap, expected in ((1, 1.0, [0.8, 0.2]), (1, 0.6, [0.6, 0.4]), (1e12, 1, [0.8, 0.2])):
        for scaled in (scale * gram, scale * gram.double()):
            alpha = min_norm_weights(scaled, cap)
            assert alpha.dtype == scaled.dtype
            assert alpha.tolist() == pytest.approx(expected, abs=1e-6)
    gram = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
    assert min_norm_weights(gram, 1.0).tolist() == pytest.approx([0.25, 0.25, 0.5], abs=1e-6)


def test_weights_are_uniform_without_a_choice_for_zeros_and_with_a_warning_on_failure(
    monkeypatch, caplog
):
    for cap in (0.1, 0.25):
        assert min_norm_weights(gram_of(4, 0), cap).tolist() == [0.25] * 4
    assert min_norm_weights(torch.zeros(3, 3), 0.9).tolist() == pytest.approx([1 / 3] * 3)

    def fail(*args, **options):
        raise ArithmeticError("singular KKT matrix")

    monkeypatch.setattr(solvers, "qp", fail)
    with caplog.at_level("WARNING", logger="flwr"):
        assert min_norm_weights(torch.eye(2), 1.0).tolist() == [0.5, 0.5]
    assert "did not solve eq. 6" in caplog.text
