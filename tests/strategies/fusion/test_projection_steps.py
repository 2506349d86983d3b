"""The pulls and moves of MA-Echo's iterations against their definitions."""

from __future__ import annotations

import pytest
import torch

from strategies.fusion.projected_layers import Layer
from strategies.fusion.projection_steps import Inputs, Span, Steps
from tests.strategies.fusion.test_projections import draw

WIDTH = 9


def layer_of(ranks, out=6, equal=(), seed=0) -> Layer:
    """Projections of several ranks, padded; they do not tell the inputs ``equal`` apart."""
    clients, most = len(ranks), max(ranks)
    bases, values = torch.zeros(clients, WIDTH, most).double(), torch.zeros(clients, most).double()
    for i, rank in enumerate(ranks):
        drawn = draw(WIDTH, rank, seed=seed + i).double()
        if equal:
            drawn[list(equal)] = drawn[equal[0]].clone()
        bases[i, :, :rank] = torch.linalg.qr(drawn).Q
        values[i, :rank] = torch.rand(rank, generator=torch.manual_seed(seed + i)).double()
    local = draw(clients, out, WIDTH, seed=seed + 50).double()
    return Layer("body.weight", local, bases, values, torch.ones(clients), torch.ones(clients))


def projections_of(layer: Layer) -> torch.Tensor:
    return (layer.bases * layer.values[:, None]) @ layer.bases.transpose(1, 2)


@pytest.mark.parametrize("equal", [(), (2, 4, 7)])
@pytest.mark.parametrize(("ranks", "by_row"), [((3, 5, 1, 4), True), ((6, 6, 5, 4), False)])
def test_pulls_and_moves_are_their_definitions(ranks, by_row, equal):
    """<pull_i, pull_j>, sum_i w_i pull_i, and F_i^T (W + move - V_i)^T."""
    layer = layer_of(ranks, equal=equal)
    span = Span(layer, fold=True)
    assert span.rows.shape == (sum(ranks), WIDTH - max(0, len(equal) - 1))
    steps = Steps(span)
    assert steps.by_row == by_row
    apart = draw(4, 6, WIDTH, seed=90).double()
    pulls = apart @ projections_of(layer)
    z = span.coordinates(lambda i: apart[i])
    torch.testing.assert_close(steps.gram(z), pulls.flatten(1) @ pulls.flatten(1).T)
    weights = draw(4).double()
    moved = steps.move(z, weights)
    expected = torch.einsum("n,nod->od", weights, pulls)
    torch.testing.assert_close(span.inputs.unfold(steps.on_inputs(moved)), expected)
    seen = steps.seen(moved)
    torch.testing.assert_close(seen, span.coordinates(lambda i: expected))
    before = z.clone()
    steps.update(z, moved)
    torch.testing.assert_close(z, before + seen)


def test_directions_of_eigenvalue_zero_are_left_out():
    layer = layer_of((2, 3))
    layer.values[1, 1] = 0.0
    span = Span(layer, fold=True)
    assert [part.stop - part.start for part in span.parts] == [2, 2]
    assert span.owners.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(span.rows.square().sum(1, keepdim=True), span.values)
    torch.testing.assert_close(span.rows[2:].T @ span.rows[2:], projections_of(layer)[1])


def test_equal_inputs_are_merged_by_hand_and_others_are_not():
    """Columns 0 and 2 are equal, 1 is not: (3, 4) becomes sqrt(2) of it, and comes back halved."""
    rows = torch.tensor([[3.0, 1.0, 3.0], [4.0, 1.0, 4.0]])
    inputs = Inputs.of(rows)
    folded = inputs.fold(rows)
    torch.testing.assert_close(folded @ folded.T, rows @ rows.T)
    assert sorted(folded.norm(dim=0).tolist()) == pytest.approx([2**0.5, 50**0.5])
    back = inputs.unfold(inputs.fold(torch.tensor([[5.0, 2.0, 1.0]])))
    torch.testing.assert_close(back, torch.tensor([[3.0, 2.0, 3.0]]))
    rows = draw(5, 8)
    rows[:, 3] = rows[:, 6] + 1e-4  # nearly equal
    rows[:, 1], rows[:, 2] = rows[:, 4].flip(0), 0.0  # the same numbers in another order
    inputs = Inputs.of(rows)
    assert inputs.group is None
    assert inputs.fold(rows) is inputs.unfold(rows) is rows
