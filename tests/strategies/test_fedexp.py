"""FedExP: its server step size by hand and where it must be 1."""

import pytest
import torch

from fedhet.strategies.base import Reply
from fedhet.strategies.fedexp import ExtrapolatedMean
from tests.strategies.sides import total_of


def replies(*updates, num_examples=1):
    tensors = [torch.tensor(values, dtype=torch.float64) for values in updates]
    return [
        Reply(client, num_examples + client, 1, 0.1, {"a": update[:1], "b": update[1:]})
        for client, update in enumerate(tensors)
    ]


def delta(*updates, eps=1e-12, num_examples=1):
    aggregator = ExtrapolatedMean(eps)
    total = total_of(replies(*updates, num_examples=num_examples), aggregator.weighting)
    aggregate = aggregator({}, total)
    return [*aggregate["a"].tolist(), *aggregate["b"].tolist()]


SIX = [[5.0 * (row == column) for column in range(6)] for row in range(6)]


@pytest.mark.parametrize(
    ("updates", "eps", "expected"),
    [
        # mean (.2, .4), squares .2 and 1 + 1: 2 / (2 * 2 * (.2 + .05)) = 2
        ([[1.0, 0.0], [-0.6, 0.8]], 0.05, [0.4, 0.8]),
        # M orthogonal ones of one length: M / 2
        ([[3.0, 0.0], [0.0, 3.0]], 1e-12, [1.5, 1.5]),
        (SIX, 1e-12, [3.0 * 5.0 / 6.0] * 6),
        # 6 * 25 / (12 (25 / 6 + 25 / 12)) = 2; with the released code's 6 eps it would be 1
        (SIX, 25 / 12, [2.0 * 5.0 / 6.0] * 6),
    ],
)
def test_updates_by_hand_whatever_the_example_counts(updates, eps, expected):
    assert delta(*updates, eps=eps) == pytest.approx(expected)
    assert delta(*updates, eps=eps) == delta(*updates, eps=eps, num_examples=1000)


@pytest.mark.parametrize(
    ("updates", "mean"),
    [
        ([[3.0, -4.0]], [3.0, -4.0]),  # one client: 1 / 2
        ([[3.0, -4.0]] * 4, [3.0, -4.0]),  # equal updates: 1 / 2
        ([[1.0, 0.0], [0.0, 0.0]], [0.5, 0.0]),  # one of two moved: 1
        ([[0.0, 0.0]] * 3, [0.0, 0.0]),  # nobody moved: 0 / eps
        ([[1.0, 2.0], [-1.0, -2.0]], [0.0, 0.0]),  # cancelled: 5 / (2 eps), of nothing
    ],
)
def test_the_plain_mean_where_there_is_nothing_to_extrapolate(updates, mean):
    """eta_g below 1 is 1, exactly, and nothing is NaN."""
    assert delta(*updates, eps=1e-12) == delta(*updates, eps=1e-3) == mean
