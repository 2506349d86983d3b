"""Inputs that no projection tells apart are merged; test_maecho.py has the iterations."""

from __future__ import annotations

import pytest
import torch

from strategies.fusion.projection_steps import Inputs
from tests.strategies.fusion.test_projections import draw


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
