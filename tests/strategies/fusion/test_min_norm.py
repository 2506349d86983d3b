"""Eq. 6 solved exactly: the conditions of its optimum, and what goes on from the last weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import strategies.fusion.min_norm
from strategies.fusion.min_norm import Shortest, by_interior_point, from_near, shortest
from tests.strategies.fusion.test_projections import draw


def vectors_of(clients: int, seed: int) -> torch.Tensor:
    """Of lengths from .1 to 1, and with something in common."""
    scales = torch.linspace(0.1, 1.0, clients)[:, None]
    return ((draw(clients, 3 * clients, seed=seed) + 0.5 * draw(1, 1, seed=9)) * scales).double()


def assert_optimal(gram: torch.Tensor, alpha: torch.Tensor, cap: float, digits: float) -> None:
    """No weight can be moved from one vector to another so that the sum gets shorter."""
    assert alpha.sum().item() == pytest.approx(1.0, abs=1e-9)
    assert alpha.min() >= 0.0
    assert alpha.max() <= cap + 1e-12
    slope = gram @ alpha / gram.diagonal().mean()
    may_grow, may_give = alpha < cap - 1e-12, alpha > 1e-12
    if may_grow.any() and may_give.any():
        assert slope[may_give].max() - slope[may_grow].min() <= digits


@pytest.mark.parametrize("clients", [2, 3, 5, 20, 50])
@pytest.mark.parametrize("share", [1.2, 2.0, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_ends_at_the_optimum(clients, share, seed):
    vectors, cap = vectors_of(clients, seed), min(1.0, share / clients)
    gram = vectors @ vectors.T
    assert_optimal(gram, shortest(gram, cap), cap, 1e-10)


def drifting(count: int = 40, clients: int = 12) -> list[torch.Tensor]:
    """Gram matrices that change a little each time, and in the end altogether."""
    first, last = vectors_of(clients, 0), vectors_of(clients, 1).flip(0)
    mixed = [first + (last - first) * t / (count - 1) for t in range(count)]
    return [vectors @ vectors.T for vectors in mixed]


@pytest.mark.parametrize("cap", [0.15, 0.5, 1.0])
def test_it_goes_on_from_the_last_weights(cap, monkeypatch):
    """cvxopt is asked once, and the weights are those of a fresh start, though bounds change."""
    asked = []

    def count(gram, cap):
        asked.append(gram)
        return by_interior_point(gram, cap)

    monkeypatch.setattr(strategies.fusion.min_norm, "by_interior_point", count)
    program = Shortest(cap)
    found = [program(gram) for gram in drifting()]
    assert len(asked) == 1
    bounds = {tuple((alpha > 0).tolist() + (alpha < cap).tolist()) for alpha in found}
    assert len(bounds) > 3
    for gram, alpha in zip(drifting(), found, strict=True):
        torch.testing.assert_close(alpha, shortest(gram, cap), atol=1e-9, rtol=0)


def test_where_the_active_set_does_not_end_cvxopt_is_asked_again(monkeypatch):
    exact = [shortest(gram, 0.4) for gram in drifting(5)]
    monkeypatch.setattr(strategies.fusion.min_norm, "from_near", lambda *_: None)
    program = Shortest(0.4)
    for gram, expected in zip(drifting(5), exact, strict=True):
        torch.testing.assert_close(program(gram), expected, atol=1e-4, rtol=0)


def test_far_away_weights_lead_there_too():
    """From one corner, of the simplex and of the capped one."""
    gram = drifting()[0].numpy()
    gram = gram / gram.diagonal().mean()
    for cap in (0.25, 1.0):
        corner = np.zeros(12)
        corner[: round(1 / cap)] = cap
        found = from_near(gram, cap, corner)
        assert_optimal(torch.from_numpy(gram), torch.from_numpy(found), cap, 1e-10)


def test_equal_vectors_share_the_weight():
    """(1, 0) twice and (0, 1): a half for the last, and a quarter for each of the first."""
    gram = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
    assert shortest(gram, 1.0).tolist() == pytest.approx([0.25, 0.25, 0.5], abs=1e-6)


def test_the_answer_has_the_type_of_the_question():
    gram = torch.eye(3)
    assert shortest(gram, 1.0).dtype == torch.float32
    assert shortest(gram.double(), 0.1).dtype == torch.float64
