"""Aggregators, server optimisers, samplers, schedules and selectors, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from common.errors import ConfigError
from strategies.base import Cohort, Reply
from strategies.components.aggregators import UniformMean, WeightedMean
from strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from strategies.components.schedules import Constant, Cosine, ExponentialDecay, MultiStep
from strategies.components.server_optimizers import SGD, Adagrad, Adam, Yogi
from strategies.components.tensor_selection import TensorSelector

COHORT = Cohort(round=1, size=1, num_clients=1)


def reply(client: int, num_examples: int, value: float) -> Reply:
    return Reply(client, num_examples, 1, 0.1, {"w": torch.tensor([value])})


def test_means_by_hand():
    """(1 * 1 + 3 * 5) / 4 = 4 and (1 + 5) / 2 = 3."""
    replies = [reply(0, 1, 1.0), reply(1, 3, 5.0)]
    assert WeightedMean()({}, replies)["w"].item() == 4.0
    assert UniformMean()({}, replies)["w"].item() == 3.0


def steps(optimizer, *deltas: float) -> list[float]:
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    optimizer.init(params)
    values = []
    for delta in deltas:
        update = {"w": torch.tensor([delta], dtype=torch.float64)}
        params = optimizer.step(params, update, COHORT)
        values.append(params["w"].item())
    return values


def test_sgd_by_hand():
    """eta 2, momentum .5, Delta 1, 1: v = 1, 1.5; x = 2, 5."""
    assert steps(SGD(lr=2.0, momentum=0.5), 1.0, 1.0) == [2.0, 5.0]


def test_adagrad_by_hand():
    """beta1 0, tau .1, eta 1, Delta 1, 2: v = .01 + 1, + 4; x += Delta / (sqrt(v) + .1)."""
    first = 1 / (math.sqrt(1.01) + 0.1)
    second = first + 2 / (math.sqrt(5.01) + 0.1)
    assert steps(Adagrad(lr=1.0, tau=0.1), 1.0, 2.0) == pytest.approx([first, second])


def test_adam_by_hand():
    """beta .5, .5, tau .1, Delta 1, 2: m = .5, 1.25; v = .505, 2.2525; no bias correction."""
    first = 0.5 / (math.sqrt(0.505) + 0.1)
    second = first + 1.25 / (math.sqrt(2.2525) + 0.1)
    assert steps(Adam(1.0, 0.5, 0.5, 0.1), 1.0, 2.0) == pytest.approx([first, second])


def test_yogi_by_hand():
    """v = .01 + .5 * 1 = .51 (Delta^2 > v), then .51 - .5 * .04 = .49 (Delta^2 = .04 < v)."""
    first = 0.5 / (math.sqrt(0.51) + 0.1)
    second = first + (0.25 + 0.1) / (math.sqrt(0.49) + 0.1)
    assert steps(Yogi(1.0, 0.5, 0.5, 0.1), 1.0, 0.2) == pytest.approx([first, second])


@pytest.mark.parametrize("optimizer", [SGD(1.0, 0.9), Adagrad(), Adam(), Yogi()])
def test_server_optimizer_state_goes_on(optimizer):
    """Two steps, save, load into a new one, a third: equals three steps."""
    whole = steps(optimizer, 1.0, -2.0, 0.5)[-1]
    begun = steps(optimizer, 1.0, -2.0)[-1]
    fresh = type(optimizer)(lr=optimizer.lr)
    if isinstance(fresh, SGD):
        fresh.momentum = optimizer.momentum
    params = {"w": torch.tensor([begun], dtype=torch.float64)}
    fresh.init(params)
    fresh.load_state_dict(optimizer.state_dict())
    update = {"w": torch.tensor([0.5], dtype=torch.float64)}
    assert fresh.step(params, update, COHORT)["w"].item() == whole


def test_fixed_size_sampler():
    sampler = FixedSizeSampler(0.1, seed=4)
    cohorts = [sampler.sample(t, 100) for t in range(1, 501)]
    assert all(len(set(cohort)) == 10 and cohort == sorted(cohort) for cohort in cohorts)
    assert cohorts[0] == FixedSizeSampler(0.1, seed=4).sample(1, 100)
    assert cohorts[0] != FixedSizeSampler(0.1, seed=5).sample(1, 100) != cohorts[1]
    counts = torch.bincount(torch.tensor(cohorts).flatten(), minlength=100)
    assert 20 < counts.min()
    assert counts.max() < 85


def test_fixed_size_sampler_rounds_half_up_and_takes_one_at_least():
    assert len(FixedSizeSampler(0.25).sample(1, 10)) == 3
    assert len(FixedSizeSampler(0.01).sample(1, 10)) == 1


def test_bernoulli_sampler():
    sizes = [len(BernoulliSampler(0.1, seed=1).sample(t, 50)) for t in range(1, 401)]
    assert min(sizes) >= 1
    assert len(set(sizes)) > 5
    assert sum(sizes) / len(sizes) == pytest.approx(5.0, abs=0.5)
    assert all(len(BernoulliSampler(0.001).sample(t, 3)) == 1 for t in range(20))


def test_schedules_by_hand():
    assert Constant()(7, 10) == 1.0
    assert ExponentialDecay(0.5)(3, 10) == 0.25
    assert [Cosine()(t, 4) for t in (1, 3)] == pytest.approx([1.0, 0.5])
    assert Cosine(floor=0.2)(5, 4) == pytest.approx(0.2)
    assert [MultiStep((0.5, 0.75), 0.1)(t, 8) for t in (4, 5, 6, 7)] == pytest.approx(
        [1.0, 0.1, 0.1, 0.01]
    )


NAMES = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_layer_selectors():
    assert TensorSelector("last:2").select(NAMES) == NAMES[2:]
    assert TensorSelector("first:1").select(NAMES) == NAMES[:1]
    assert TensorSelector("head.*,*.0.bias").select(NAMES) == NAMES[1:]
    assert TensorSelector("all").select(NAMES) == NAMES
    assert TensorSelector("none").select(NAMES) == []


@pytest.mark.parametrize("spec", ["classifier", "fc*", "last:5"])
def test_a_selector_that_fits_nothing_lists_the_tensors(spec):
    with pytest.raises(ConfigError, match=r"head\.weight"):
        TensorSelector(spec).select(NAMES)
