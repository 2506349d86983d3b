"""FedDW's term by hand, by brute force and against its own bounds; its recipe."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import ConfigError
from common.results import read_rows
from conf import build_part, compose
from strategies.base import Step
from strategies.components.local_optimizers import SGD
from strategies.feddw import FedDWClient
from strategies.privacy.gaussian_mechanism import GaussianMechanism
from strategies.statistics.class_means import MEANS
from strategies.statistics.soft_labels import SOFT_LABELS
from tests.recipes import overrides, run_recipe
from tests.strategies.labelled import QUICK, Biasless, Classifier
from tests.strategies.sides import check_side


def step_of(weight, labels, round=1, num_steps=0, first_pass=True, **params):
    received = {SOFT_LABELS: {MEANS: labels}}
    at = {"round": round, "num_steps": num_steps, "first_pass": first_pass}
    context = SimpleNamespace(received=received, **at)
    return Step({"head.weight": weight, **params}, None, None, None, None, context)


def draw(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def labels_of(classes, seed=1):
    return torch.softmax(draw(classes, classes, seed=seed), dim=1)


def begun(**options):
    side = FedDWClient(**options)
    side.begin(None)
    return side


def test_the_term_by_hand():
    """W W^T = [[ln 3, 0], [0, 0]], so CR = [[3/4, 1/4], [1/2, 1/2]].

    With SL = [[1, 0], [1/2, 1/2]] the squares are 1/16, 1/16, 0, 0, their mean 1/32; mu = 8.
    """
    weight = torch.tensor([[math.sqrt(math.log(3)), 0.0], [0.0, 0.0]])
    labels = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert begun(mu=8.0).penalty(step_of(weight, labels)).item() == pytest.approx(0.25)


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_the_term_by_brute_force_and_its_bounds(classes):
    """Eq. 11 by numpy; eq. 18: it is in (0, 2 / C), and 2 / C where W is sure of the wrong."""
    for seed, scale in enumerate((0.01, 0.3, 1.0)):
        weight, labels = draw(classes, 8, seed=seed, scale=scale), labels_of(classes, seed + 100)
        relations = np.exp(weight.numpy() @ weight.numpy().T)
        relations /= relations.sum(axis=1, keepdims=True)
        value = begun(mu=1.0).penalty(step_of(weight, labels)).item()
        assert value == pytest.approx(((labels.numpy() - relations) ** 2).mean())
        assert 0 < value < 2 / classes
    sure, other = 5 * torch.eye(classes), torch.eye(classes).roll(1, dims=0)
    assert begun(mu=1.0).penalty(step_of(sure, other)).item() == pytest.approx(2 / classes, 1e-6)


def test_the_linearised_reference_is_taken_again_every_so_many_steps_and_every_round():
    """Eq. 30. The parameter moves in place; a step's second pass, elsewhere, takes none."""
    side, labels = FedDWClient(mu=1.0, linearised_every=2), labels_of(3)
    weight = nn.Parameter(torch.empty(3, 2, dtype=torch.float64))
    places = [draw(3, 2, seed=seed) for seed in range(7)]
    references = [0, 0, 2, 2, 4, 5, 5]  # a round of five steps, then a new one
    for number, reference in enumerate(references):
        with torch.no_grad():
            weight.copy_(places[number])
        old = places[reference]
        relations = old @ weight.T + weight @ old.T - old @ old.T
        expected = (labels - relations).square().mean()
        found = side.penalty(step_of(weight, labels, num_steps=number % 5))
        torch.testing.assert_close(found, expected)
        gradient = torch.autograd.grad(found, weight)
        elsewhere = nn.Parameter(weight + 1.0)
        side.penalty(step_of(elsewhere, labels, num_steps=number % 5, first_pass=False))
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight))


@pytest.mark.parametrize(
    ("round", "factor"), [(1, 1.0), (8, 1.0), (9, 0.1), (17, 0.1), (18, 0.01), (27, 0.001)]
)
def test_mu_decays_at_the_start_of_every_ninth_round(round, factor):
    weight, labels = draw(3, 2), labels_of(3)
    plain = begun(mu=2.0).penalty(step_of(weight, labels, round))
    decayed = begun(mu=2.0, decay=0.1).penalty(step_of(weight, labels, round))
    torch.testing.assert_close(decayed, factor * plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=feddw", "task.head_bias=true"], r"set task\.head_bias=false"),
        (["strategy=[feddw,fedper]"], r"leave it out of strategy\.personal"),
    ],
)
def test_a_head_that_it_cannot_tie_is_refused_before_round_1(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_recipe(tmp_path, *QUICK, *words)
    metrics = tmp_path / "metrics.jsonl"
    assert not metrics.exists() or read_rows(metrics) == []


def test_a_head_with_bias_or_none_by_its_name_is_refused_at_the_client():
    for model, message in (
        (Classifier(), r"task\.head_bias=false"),
        (nn.ModuleDict({"last": nn.Linear(2, 2, bias=False)}), "`head`, and that is NoneType"),
        (nn.ModuleDict({"head": nn.Sequential()}), "`head`, and that is Sequential"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_side(FedDWClient(), model, SGD())
    check_side(FedDWClient(), Biasless(), SGD())


@pytest.mark.slow
def test_the_recipes_options_arrive():
    words = ["feddw.mu=3", "feddw.decay=0.1", "feddw.decay_every=4", "feddw.linearised_every=5"]
    words += ["soft_labels.smoothing=0.5", "soft_labels.history=all", "soft_labels.absent=identity"]
    words += ["soft_labels.noise_multiplier=2", "soft_labels.clip=0.5", "soft_labels.delta=1e-6"]
    recipe = compose(overrides("strategy=feddw", *(f"strategy.{word}" for word in words)))
    client = build_part(recipe, "strategy.client_sides", 1)
    server = build_part(recipe, "strategy.server_sides", 1)["soft_labels"]
    term = client["feddw"]
    assert (term.mu, term.decay, term.decay_every, term.linearised_every) == (3, 0.1, 4, 5)
    assert (server.smoothing, server.history, server.absent) == (0.5, "all", "identity")
    mechanism = GaussianMechanism(noise_multiplier=2, clip=0.5, delta=1e-6)
    assert server.mechanism == client["soft_labels"].mechanism == mechanism
