"""The figures of a round, and the norm-mean, by hand."""

import itertools
from dataclasses import replace

import pytest
import torch

from fedhet.strategies.base import Reply
from fedhet.strategies.components.aggregators import NormMean, UniformMean, WeightedMean
from fedhet.strategies.round.update_diagnostics import diagnose, diagnose_layers
from tests.strategies.sides import total_of


def replies_of(*updates: list[float]) -> list[Reply]:
    """Replies whose update lies in two tensors: its first number, and the rest."""
    return [
        Reply(i, 10 + i, 5, 0.5, {"a": torch.tensor(u[:1]), "b": torch.tensor(u[1:])})
        for i, u in enumerate(updates)
    ]


def figures_of(*updates: list[float], aggregator=None) -> dict[str, float]:
    aggregator = aggregator or UniformMean()
    total = total_of(replies_of(*updates), aggregator.weighting)
    return diagnose(total, aggregator({}, total))


def aggregate(aggregator, replies) -> list[float]:
    delta = aggregator({}, total_of(replies, aggregator.weighting))
    return [*delta["a"].tolist(), *delta["b"].tolist()]


def test_orthogonal_and_equal_updates():
    """Of norms 3 and 4: their sum has norm 5."""
    expected = {"norm_ratio": 5 / 7, "update_cosine": 0.0, "drift_diversity": 1.0}
    expected |= {"update_norm": 3.5, "step_norm": 2.5}
    assert figures_of([3.0, 0.0], [0.0, 4.0]) == pytest.approx(expected, abs=1e-7)
    expected = {"norm_ratio": 1.0, "update_cosine": 1.0, "drift_diversity": 1 / 3}
    expected |= {"update_norm": 5.0, "step_norm": 5.0}
    assert figures_of(*[[3.0, 4.0]] * 3) == pytest.approx(expected)


@pytest.mark.parametrize("aggregator", [UniformMean(), WeightedMean()])
def test_figures_by_brute_force_over_all_clients_and_pairs(aggregator):
    """Of lengths from .1 to 9; the examples weigh 10 to 14."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 6, generator=generator) * torch.tensor([1.0, 2.0, 9.0, 0.1, 3.0])[:, None]
    counts = torch.arange(10.0, 15.0) if aggregator.weighting == "examples" else torch.ones(5)
    weighted = [(n / counts.sum() * row).double() for n, row in zip(counts, rows, strict=True)]
    pairs = [(u, v, float(u.norm() * v.norm())) for u, v in itertools.combinations(weighted, 2)]
    cosines = [float(torch.cosine_similarity(u, v, dim=0)) * weight for u, v, weight in pairs]
    lengths = [float(u.norm()) for u in weighted]
    of_sum = float(sum(weighted).norm())
    expected = {
        "norm_ratio": of_sum / sum(lengths),
        "update_cosine": sum(cosines) / sum(weight for *_, weight in pairs),
        "drift_diversity": sum(length**2 for length in lengths) / of_sum**2,
        "update_norm": sum(lengths),
        "step_norm": of_sum,
    }
    found = figures_of(*rows.tolist(), aggregator=aggregator)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_what_is_not_defined_is_left_out():
    assert "update_cosine" not in figures_of([3.0, 4.0])
    assert "update_cosine" not in figures_of([3.0, 4.0], [0.0, 0.0])
    assert "update_cosine" not in figures_of([1.0, 0.0], [0.0, 1e-17])  # one dwarfs the other
    assert figures_of([0.0, 0.0], [0.0, 0.0]) == {"update_norm": 0.0, "step_norm": 0.0}
    opposed = {"norm_ratio": 0.0, "update_cosine": -1.0, "update_norm": 1.0, "step_norm": 0.0}
    assert figures_of([1.0, 0.0], [-1.0, 0.0]) == pytest.approx(opposed)
    assert diagnose(total_of([Reply(0, 1, 1, 0.1, {}), Reply(1, 1, 1, 0.1, {})]), {}) == {}


def test_norm_mean_by_hand():
    """Norms 3 and 4, sum (3, 4) of norm 5: 3.5 (.6, .8); by tensor it would be (1.5, 2)."""
    same = [3.0, -4.0]
    for updates, expected in (([[3.0, 0.0], [0.0, 4.0]], [2.1, 2.8]), ([same] * 3, same)):
        replies = replies_of(*updates)
        assert aggregate(NormMean(), replies) == pytest.approx(expected)
        heavy = [replace(replies[0], num_examples=1000), *replies[1:]]
        assert aggregate(NormMean(), heavy) == aggregate(NormMean(), replies)


def test_norm_mean_of_updates_that_cancel_is_zero():
    for updates in ([[0.0, 0.0]] * 2, [[1.0, 2.0], [-1.0, -2.0]]):
        assert aggregate(NormMean(), replies_of(*updates)) == [0.0, 0.0]
    but_for_rounding = [0.1, 0.2], [0.2, -0.3], [-0.3, 0.1]
    assert aggregate(NormMean(), replies_of(*but_for_rounding)) == [0.0, 0.0]


def test_each_tensor_has_its_own_figures():
    """Tensor a: 3 and -1, which nearly cancel; tensor b: orthogonal, of norms 2 and 1."""
    total = total_of(replies_of([3.0, 2.0, 0.0], [-1.0, 0.0, 1.0]))
    figures = diagnose_layers(total, ["a", "b"])
    assert figures["drift_diversity"] == pytest.approx({"a": 10 / 4, "b": 1.0})
    assert figures["update_norm"] == pytest.approx({"a": 2.0, "b": 1.5})
    assert diagnose_layers(total, ["b"])["update_norm"] == {"b": 1.5}
    cancelled = diagnose_layers(total_of(replies_of([1.0, 1.0], [-1.0, 1.0])), ["a", "b"])
    assert cancelled["drift_diversity"] == {"b": 0.5}
    assert cancelled["update_norm"] == {"a": 1.0, "b": 1.0}
