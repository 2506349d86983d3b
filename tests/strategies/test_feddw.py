"""FedDW's term by brute force and against its own bounds; its recipe's options."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedhet.strategies.base import Step
from fedhet.strategies.feddw import FedDW
from fedhet.strategies.statistics.class_means import MEANS
from fedhet.strategies.statistics.soft_labels import SOFT_LABELS
from tests.strategies.sides import client_side


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
    side = client_side(FedDW, **options)
    side.begin(None)
    return side


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_the_term_by_brute_force_and_its_bounds(classes):
    """Eq. 11 by numpy; eq. 18: it is in (0, 2 / C), and 2 / C where W is sure of the wrong."""
    for seed, scale in enumerate((0.01, 0.3, 1.0)):
        weight, labels = draw(classes, 8, seed=seed, scale=scale), labels_of(classes, seed + 100)
        relations = np.exp(weight.numpy() @ weight.numpy().T)
        relations /= relations.sum(axis=1, keepdims=True)
        value = begun(mu=8.0).penalty(step_of(weight, labels)).item() / 8
        assert value == pytest.approx(((labels.numpy() - relations) ** 2).mean())
        assert 0 < value < 2 / classes
        with torch.autocast("cpu", torch.bfloat16):
            single = begun(mu=1.0).penalty(step_of(weight.float(), labels.float())).item()
        assert single == pytest.approx(value, rel=1e-4)
    sure, other = 5 * torch.eye(classes), torch.eye(classes).roll(1, dims=0)
    assert begun(mu=1.0).penalty(step_of(sure, other)).item() == pytest.approx(2 / classes, 1e-6)


def test_the_linearised_reference_is_taken_again_every_so_many_steps_and_every_round():
    """Eq. 30. The parameter moves in place; a step's second pass, elsewhere, takes none."""
    side, labels = client_side(FedDW, mu=1.0, linearised_every=2), labels_of(3)
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
