"""Aggregators, server optimisers, samplers, schedules and selectors, by hand."""

import copy
import math

import pytest
import torch

from fedhet.strategies.base import Cohort, Reply
from fedhet.strategies.components.aggregators import UniformMean, WeightedMean
from fedhet.strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from fedhet.strategies.components.schedules import Constant, Cosine, ExponentialDecay, MultiStep
from fedhet.strategies.components.server_optimizers import SGD, Adagrad, Adam, Yogi
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.modes.asynchronous import Asynchronous
from tests.refused import refused
from tests.strategies.sides import total_of

COHORT = Cohort(round=1, size=1, num_clients=1)


def test_means_by_hand():
    """(1 * 1 + 3 * 5) / 4 = 4 and (1 + 5) / 2 = 3."""
    pairs = (1, 1.0), (3, 5.0)
    replies = [Reply(0, n, 1, 0.1, {"w": torch.tensor([value])}) for n, value in pairs]
    for aggregator, expected in ((WeightedMean(), 4.0), (UniformMean(), 3.0)):
        total = total_of(replies, aggregator.weighting)
        assert aggregator({}, total)["w"].item() == expected


def steps(optimizer, *deltas: float, start: float = 0.0) -> list[float]:
    values = [start]
    for delta in deltas:
        x, update = ({"w": torch.tensor([v], dtype=torch.float64)} for v in (values[-1], delta))
        values.append(optimizer.step(x, update, COHORT)["w"].item())
    return values[1:]


def begun(optimizer):
    optimizer.init({"w": torch.zeros(1, dtype=torch.float64)})
    return optimizer


def quotient(numerator: float, second_moment: float) -> float:
    return numerator / (math.sqrt(second_moment) + 0.1)  # tau .1


BY_HAND = {
    # eta 2, momentum .5: v = 1, 1.5
    "sgd": (SGD(lr=2.0, momentum=0.5), (1.0, 1.0), [2.0, 3.0]),
    # beta1 0: v = .01 + 1, + 4
    "adagrad": (Adagrad(lr=1.0, tau=0.1), (1.0, 2.0), [quotient(1, 1.01), quotient(2, 5.01)]),
    # beta .5, .25: m = .5, 1.25; v = .25 * .01 + .75, then .25 * .7525 + .75 * 4; no correction
    "adam": (
        Adam(lr=1.0, beta1=0.5, beta2=0.25, tau=0.1),
        (1, 2),
        [quotient(0.5, 0.7525), quotient(1.25, 3.188125)],
    ),
    # v = .01 + .75 * 1 (Delta^2 > v), then .76 - .75 * .04 (Delta^2 < v)
    "yogi": (
        Yogi(lr=1.0, beta1=0.5, beta2=0.25, tau=0.1),
        (1, 0.2),
        [quotient(0.5, 0.76), quotient(0.35, 0.73)],
    ),
}


@pytest.mark.parametrize(("optimizer", "deltas", "moves"), BY_HAND.values(), ids=BY_HAND)
def test_server_optimizers_by_hand(optimizer, deltas, moves):
    assert steps(begun(optimizer), *deltas) == pytest.approx([moves[0], sum(moves)], rel=1e-12)


@pytest.mark.parametrize("optimizer", [SGD(lr=1.0, momentum=0.9), Adagrad(), Adam(), Yogi()])
def test_server_optimizer_state_goes_on(optimizer):
    first, whole, fresh = (begun(copy.deepcopy(optimizer)) for _ in range(3))
    x = steps(first, 1.0, -2.0)[-1]
    fresh.load_state_dict(first.state_dict())
    assert steps(fresh, 0.5, start=x) == steps(whole, 1.0, -2.0, 0.5)[2:]


def test_fixed_size_sampler():
    sampler = FixedSizeSampler(participation=0.1, seed=4)
    cohorts = [sampler.sample(t, 100) for t in range(1, 501)]
    assert all(len(set(cohort)) == 10 and cohort == sorted(cohort) for cohort in cohorts)
    assert cohorts[0] == FixedSizeSampler(participation=0.1, seed=4).sample(1, 100)
    assert cohorts[0] != FixedSizeSampler(participation=0.1, seed=5).sample(1, 100) != cohorts[1]
    counts = torch.bincount(torch.tensor(cohorts).flatten(), minlength=100)
    assert 20 < counts.min() <= counts.max() < 85
    assert [len(FixedSizeSampler(participation=share).sample(1, 10)) for share in (0.25, 0.01)] == [
        3,
        1,
    ]


def test_bernoulli_sampler():
    sizes = [len(BernoulliSampler(participation=0.1, seed=1).sample(t, 50)) for t in range(1, 401)]
    assert min(sizes) >= 1
    assert len(set(sizes)) > 5
    assert sum(sizes) / len(sizes) == pytest.approx(5.0, abs=0.5)
    assert all(len(BernoulliSampler(participation=0.001).sample(t, 3)) == 1 for t in range(20))


def test_secret_cohorts_have_the_probability_and_are_drawn_anew_by_each_sampler():
    first, second = (BernoulliSampler(participation=0.1, seed=None) for _ in range(2))
    cohorts = [first.sample(t, 1000) for t in range(1, 101)]
    assert cohorts == [first.sample(t, 1000) for t in range(1, 101)]
    assert cohorts[0] != cohorts[1]
    assert cohorts[0] != second.sample(1, 1000)
    # 100,000 draws: five standard deviations
    assert sum(map(len, cohorts)) == pytest.approx(10_000, abs=5 * 95)
    with refused("strategy.sampler.seed="):
        FixedSizeSampler(participation=0.1, seed=None)


def test_schedules_by_hand():
    assert Constant()(7, 10) == 1.0
    assert ExponentialDecay(decay=0.5)(3, 10) == 0.25
    assert [Cosine()(t, 4) for t in (1, 3)] == pytest.approx([1.0, 0.5])
    assert Cosine(floor=0.2)(5, 4) == pytest.approx(0.2)
    # .55 * 100 is 55.00000000000001
    assert [MultiStep(milestones=(0.55,), decay=0.1)(t, 100) for t in (55, 56)] == [1.0, 0.1]
    stepped = [MultiStep(milestones=(0.5, 0.75), decay=0.1)(t, 8) for t in (4, 5, 6, 7)]
    assert stepped == pytest.approx([1.0, 0.1, 0.1, 0.01])


def test_a_reply_is_too_old_beyond_the_greatest_staleness():
    assert [Asynchronous(max_staleness=1).too_old(tau) for tau in (0, 1, 2)] == [False, False, True]
    assert [Asynchronous(max_staleness=0).too_old(tau) for tau in (0, 1)] == [False, True]
    assert not Asynchronous().too_old(1000)


NAMES = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_layer_selectors():
    selected = {"last:2": NAMES[2:], "first:1": NAMES[:1], "head.*,*.0.bias": NAMES[1:]}
    selected["not:*.bias"] = NAMES[::2]
    for spec, names in {**selected, "all": NAMES, "none": []}.items():
        assert TensorSelector(spec).select(NAMES) == names
    for spec in ("classifier", "fc*", "last:5", "not:*"):
        with refused("head.weight"):  # lists the tensors
            TensorSelector(spec).select(NAMES)
