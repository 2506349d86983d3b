"""The figures of a round, and the norm-mean, by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from strategies.base import Reply
from strategies.components.aggregators import NormMean, UniformMean
from strategies.statistics.update_diagnostics import diagnose, diagnose_layers


def replies_of(*updates: list[float]) -> list[Reply]:
    """Replies whose update lies in two tensors: its first number, and the rest."""
    return [
        Reply(i, 10 + i, 5, 0.5, {"a": torch.tensor(u[:1]), "b": torch.tensor(u[1:])})
        for i, u in enumerate(updates)
    ]


def aggregate(aggregator, replies) -> list[float]:
    delta = aggregator({}, replies)
    return [*delta["a"].tolist(), *delta["b"].tolist()]


def test_orthogonal_updates():
    """Of norms 3 and 4: their sum has norm 5."""
    replies = replies_of([3.0, 0.0], [0.0, 4.0])
    figures = diagnose(replies, UniformMean()({}, replies))
    assert figures["norm_ratio"] == pytest.approx(5 / 7)
    assert figures["update_cosine"] == pytest.approx(0.0, abs=1e-7)
    assert figures["drift_diversity"] == pytest.approx(1.0)
    assert figures["update_norm"] == pytest.approx(3.5)
    assert figures["step_norm"] == pytest.approx(2.5)


def test_equal_updates():
    replies = replies_of([3.0, 4.0], [3.0, 4.0], [3.0, 4.0])
    figures = diagnose(replies, UniformMean()({}, replies))
    expected = {"norm_ratio": 1.0, "update_cosine": 1.0, "drift_diversity": 1 / 3}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_the_cosine_is_the_mean_over_all_pairs():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 6, generator=generator) * torch.tensor(
        [[1.0], [2.0], [9.0], [0.1], [3.0]]
    )
    expected = [
        torch.cosine_similarity(left, right, dim=0).item()
        for left, right in itertools.combinations(rows, 2)
    ]
    replies = replies_of(*rows.tolist())
    figures = diagnose(replies, UniformMean()({}, replies))
    assert figures["update_cosine"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def test_what_is_not_defined_is_left_out():
    alone = replies_of([3.0, 4.0])
    assert "update_cosine" not in diagnose(alone, alone[0].update)
    still = replies_of([0.0, 0.0], [0.0, 0.0])
    assert diagnose(still, still[0].update) == {"update_norm": 0.0, "step_norm": 0.0}
    opposed = replies_of([1.0, 0.0], [-1.0, 0.0])
    figures = diagnose(opposed, still[0].update)
    assert figures["norm_ratio"] == 0.0
    assert figures["update_cosine"] == pytest.approx(-1.0)
    assert "drift_diversity" not in figures


def test_where_nothing_is_shared_there_are_none():
    assert diagnose([Reply(0, 1, 1, 0.1, {}), Reply(1, 1, 1, 0.1, {})], {}) == {}


def test_norm_mean_of_orthogonal_updates_by_hand():
    """Norms 3 and 4, sum (3, 4) of norm 5: 3.5 (.6, .8). By tensor it would be (1.5, 2)."""
    assert aggregate(NormMean(), replies_of([3.0, 0.0], [0.0, 4.0])) == pytest.approx([2.1, 2.8])


def test_norm_mean_of_one_and_of_equal_updates_is_the_update():
    for count in (1, 3):
        found = aggregate(NormMean(), replies_of(*[[3.0, -4.0]] * count))
        assert found == pytest.approx([3.0, -4.0])


def test_norm_mean_has_the_mean_norm_whatever_the_order():
    rows = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).tolist()
    found = [
        torch.tensor(aggregate(NormMean(), replies_of(*order)))
        for order in itertools.permutations(rows)
    ]
    norms = [math.hypot(*row) for row in rows]
    for delta in found:
        assert delta.norm().item() == pytest.approx(sum(norms) / 4, rel=1e-6)
        torch.testing.assert_close(delta, found[0], rtol=1e-6, atol=1e-7)


def test_norm_mean_weighs_clients_alike():
    """The first has 10 examples, the second would count 100 times more."""
    replies = replies_of([3.0, 0.0], [0.0, 4.0])
    heavy = [replies[0], Reply(1, 1000, 5, 0.5, replies[1].update)]
    assert aggregate(NormMean(), heavy) == aggregate(NormMean(), replies)


@pytest.mark.parametrize(
    "updates",
    [
        ([0.0, 0.0], [0.0, 0.0]),
        ([1.0, 2.0], [-1.0, -2.0]),
        ([0.1, 0.2], [0.2, -0.3], [-0.3, 0.1]),  # cancel but for rounding
    ],
)
def test_norm_mean_of_updates_that_cancel_is_zero(updates):
    assert aggregate(NormMean(), replies_of(*updates)) == [0.0, 0.0]


def test_each_tensor_has_its_own_figures():
    """Tensor a: 3 and -1, which nearly cancel; tensor b: orthogonal, of norms 2 and 1."""
    replies = replies_of([3.0, 2.0, 0.0], [-1.0, 0.0, 1.0])
    figures = diagnose_layers(replies, ["a", "b"])
    assert figures["drift_diversity"] == pytest.approx({"a": 10 / 4, "b": 1.0})
    assert figures["update_norm"] == pytest.approx({"a": 2.0, "b": 1.5})
    assert diagnose_layers(replies, ["b"])["update_norm"] == {"b": 1.5}


def test_a_tensor_whose_updates_cancel_has_no_diversity():
    replies = replies_of([1.0, 1.0], [-1.0, 1.0])
    figures = diagnose_layers(replies, ["a", "b"])
    assert figures["drift_diversity"] == {"b": 0.5}
    assert figures["update_norm"] == {"a": 1.0, "b": 1.0}
