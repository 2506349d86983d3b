"""MA-Echo's pulls and moves: each way of computing them against their definitions."""

from __future__ import annotations

import pytest
import torch

from strategies.fusion.projected_layers import Layer
from strategies.fusion.projection_steps import (
    AlongDirections,
    AlongInputs,
    Inputs,
    PullByPull,
    Span,
    cheapest,
)
from tests.strategies.fusion.test_projections import draw

WAYS = [AlongInputs, AlongDirections, PullByPull]
RANKS = (3, 5, 1, 4)


def layer_of(ranks=RANKS, out=6, width=9, equal=(), seed=0) -> Layer:
    """Projections of several ranks, padded; the inputs ``equal`` are not told apart."""
    clients, most = len(ranks), max(ranks)
    bases, values = torch.zeros(clients, width, most).double(), torch.zeros(clients, most).double()
    for i, rank in enumerate(ranks):
        drawn = draw(width, rank, seed=seed + i).double()
        if equal:
            drawn[list(equal)] = drawn[equal[0]].clone()
        bases[i, :, :rank] = torch.linalg.qr(drawn).Q
        values[i, :rank] = torch.rand(rank, generator=torch.manual_seed(seed + i)).double()
    local = draw(clients, out, width, seed=seed + 50).double()
    return Layer("body.weight", local, bases, values, torch.ones(clients), torch.ones(clients))


def projections_of(layer: Layer) -> torch.Tensor:
    return (layer.bases * layer.values[:, None]) @ layer.bases.transpose(1, 2)


@pytest.mark.parametrize("equal", [(), (2, 4, 7)])
@pytest.mark.parametrize("way", WAYS)
def test_pulls_and_moves_are_their_definitions(way, equal):
    """<pull_i, pull_j>, sum_i shares_i pull_i, and F_i^T (W + move - V_i)^T; twice, for buffers."""
    layer = layer_of(equal=equal)
    span = Span(layer, fold=True)
    assert span.rows.shape == (sum(RANKS), 9 - max(0, len(equal) - 1))
    steps = way(span)
    for seed in (0, 1):
        apart = draw(4, 6, 9, seed=90 + seed).double()
        pulls = apart @ projections_of(layer)
        z = span.coordinates(lambda i, apart=apart: apart[i])
        gram = steps.gram(z)
        torch.testing.assert_close(gram, pulls.flatten(1) @ pulls.flatten(1).T)
        shares = draw(4, seed=seed).double()
        moved = steps.move(z, shares)
        expected = torch.einsum("n,nod->od", shares, pulls)
        torch.testing.assert_close(span.inputs.unfold(steps.on_inputs(moved)), expected)
        seen = steps.seen(moved)
        torch.testing.assert_close(seen, span.coordinates(lambda i, move=expected: move))
        before = z.clone()
        steps.take_in(moved, z)
        torch.testing.assert_close(z, before + seen)
        torch.testing.assert_close(
            steps.on_inputs(steps.zero(apart[0])), 0 * steps.on_inputs(moved)
        )


@pytest.mark.parametrize("way", [AlongInputs, AlongDirections])
def test_without_a_gram_matrix(way):
    layer = layer_of()
    span = Span(layer, fold=True)
    apart = draw(4, 6, 9, seed=90).double()
    z = span.coordinates(lambda i: apart[i])
    moved = way(span).move(z, torch.full((4,), 0.5).double())
    expected = 0.5 * (apart @ projections_of(layer)).sum(0)
    torch.testing.assert_close(way(span).on_inputs(moved), expected)


def test_directions_without_weight_are_left_out():
    layer = layer_of(ranks=(2, 3))
    layer.values[1, 1] = 0.0
    span = Span(layer, fold=True)
    assert [part.stop - part.start for part in span.parts] == [2, 2]
    assert span.owners.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(span.rows.square().sum(1, keepdim=True), span.values)
    torch.testing.assert_close(span.rows[2:].T @ span.rows[2:], projections_of(layer)[1])


def test_inputs_by_hand():
    """Columns 0 and 2 are equal, 1 is not: (3, 4) becomes sqrt(2) of it, and comes back halved."""
    rows = torch.tensor([[3.0, 1.0, 3.0], [4.0, 1.0, 4.0]])
    inputs = Inputs.of(rows)
    folded = inputs.fold(rows)
    torch.testing.assert_close(folded @ folded.T, rows @ rows.T)
    lengths = sorted(folded.norm(dim=0).tolist())
    assert lengths == pytest.approx([2**0.5, 50**0.5])
    back = inputs.unfold(inputs.fold(torch.tensor([[5.0, 2.0, 1.0]])))
    torch.testing.assert_close(back, torch.tensor([[3.0, 2.0, 3.0]]))


def test_inputs_that_differ_are_all_kept():
    rows = draw(5, 8)
    rows[:, 3] = rows[:, 6] + 1e-4  # nearly the same
    rows[:, 1], rows[:, 2] = rows[:, 4].flip(0), 0.0
    inputs = Inputs.of(rows)
    assert inputs.group is None
    assert inputs.fold(rows) is rows
    assert inputs.unfold(rows) is rows


@pytest.mark.parametrize(
    ("ranks", "width", "way"),
    [
        ((2,) * 10, 400, AlongDirections),  # few directions
        ((200,) * 5, 700, PullByPull),
        ((500,) * 5, 700, AlongInputs),
        ((200,) * 10, 700, AlongInputs),  # many clients
    ],
)
def test_the_cheapest_way(ranks, width, way):
    span = Span.__new__(Span)
    span.rows = torch.zeros(sum(ranks), width)
    span.parts = [slice(0, 0)] * len(ranks)
    assert type(cheapest(span, gram=True)) is way
    uniform = AlongDirections if sum(ranks) < 2 * width else AlongInputs
    assert type(cheapest(span, gram=False)) is uniform
