"""OT alignment: permuted clients are put back, and whatever aggregates gives what it gave."""

import math
from importlib import util

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from fedhet.strategies.average import Average
from fedhet.strategies.base import Reply
from fedhet.strategies.fusion.layer_chain import read_chain, reordered
from fedhet.strategies.fusion.projections import ProjectionClient, Projections
from fedhet.strategies.maecho import MAEcho
from fedhet.strategies.otfusion import NeuronAlignment, transport
from fedhet.strategies.regmean import RegMean, RegressionMean
from fedhet.tasks.models import Head, build_model
from tests.refused import refused
from tests.strategies.fusion.test_layer_chain import any_orders, normalised, tensors
from tests.strategies.fusion.test_projections import draw, sent_by
from tests.strategies.sides import client_side

INPUTS = {"mlp": (1, 6, 6), "feddw_cnn": (3, 20, 20), "normalised": (3, 32, 32)}
METHODS = [Average(), MAEcho(iterations=20), RegMean()]
METHODS += [MAEcho(step=0.05, normalise=True, iterations=20)]
FUSIONS = [one.parts().aggregator for one in METHODS]


def model_of(kind: str, seed: int) -> nn.Module:
    if kind == "normalised":
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return normalised()
    return build_model(
        kind, input_shape=INPUTS[kind], num_classes=10, head=Head(bias=True), seed=seed
    )


def permuted(model: nn.Module, seed: int) -> nn.Module:
    params = tensors(model)
    model.load_state_dict(reordered(read_chain(params), params, any_orders(params, seed)))
    return model


def replies_of(kind: str, models: list[nn.Module], side: ProjectionClient) -> tuple[dict, list]:
    x = {n: 0.1 * draw(*v.shape, seed=5) for n, v in tensors(models[0]).items()}
    replies = []
    for i, model in enumerate(models):
        payloads = sent_by(side, model, draw(12, *INPUTS[kind], seed=10 + i))
        counts = {"class_counts": {"counts": torch.tensor([3.0, 9.0 * (i % 2), *[0.0, 2.0] * 4])}}
        update = {name: value - x[name] for name, value in tensors(model).items()}
        replies.append(Reply(i, 12, 1, 0.1, update, {**payloads, **counts}))
    return x, replies


def fused(aggregator, x: dict, replies: list) -> dict[str, torch.Tensor]:
    delta = aggregator(x, replies)
    return {name: x[name] + delta[name] for name in x}


def difference(left: dict, right: dict) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "width"), [(5, 3), (600, 5)])  # POT's default stops too early
def test_the_transport_is_the_best_assignment(count, width):
    for seed in range(3):
        rows, anchor = draw(count, width, seed=seed), draw(count, width, seed=seed + 50)
        distances = torch.cdist(*(nn.functional.normalize(m.double()) for m in (rows, anchor)))
        left, right = linear_sum_assignment(distances.numpy())
        found = distances[transport(rows, anchor), torch.arange(count)].sum()
        assert float(found) == pytest.approx(float(distances[left, right].sum()))
        assert transport(rows, rows).tolist() == list(range(count))


@pytest.mark.slow
def test_distances_are_between_directions_and_not_squared():
    """At 0 and +-66.7 degrees: staying costs 0 + 1.84, changing 1.1 + 1.1, squared 3.4 and 2.4."""
    angle = math.radians(66.7)
    rows, anchor = (
        torch.tensor([[1.0, 0.0], [math.cos(angle), sign * math.sin(angle)]]) for sign in (-1, 1)
    )
    assert transport(torch.tensor([[7.0], [0.2]]) * rows, anchor).tolist() == [0, 1]
    assert transport(rows.flip(0), torch.tensor([[0.3], [5.0]]) * anchor).tolist() == [1, 0]


def test_a_bias_tells_rows_apart():
    """All weights are alike, so only the biases say which neuron is which."""
    bias = torch.tensor([-2.0, -0.5, 0.5, 2.0])
    params = {"body.0.weight": torch.ones(4, 2), "body.0.bias": bias, "head.weight": draw(3, 4)}
    moved = reordered(read_chain(params), params, [torch.tensor([2, 0, 3, 1])])
    replies = [Reply(i, 1, 1, 0.1, update) for i, update in enumerate((params, moved))]
    zero = {name: torch.zeros_like(value) for name, value in params.items()}
    assert difference(NeuronAlignment()(zero, replies)[1].update, params) == 0


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS)
def test_permuting_a_client_s_neurons_changes_nothing(fusion):
    side = client_side(Projections, rank=8)
    x, replies = replies_of("mlp", [model_of("mlp", seed) for seed in (1, 2, 3)], side)
    expected = fused(fusion, x, NeuronAlignment()(x, replies))
    others = [permuted(model_of("mlp", seed), seed) for seed in (2, 3)]
    _, moved = replies_of("mlp", [model_of("mlp", 1), *others], side)
    rounding = 2e-4 if isinstance(fusion, RegressionMean) else 1e-5  # it inverts small eigenvalues
    assert difference(fused(fusion, x, NeuronAlignment()(x, moved)), expected) < rounding
    assert difference(fused(fusion, x, moved), expected) > 1e-3  # but for the alignment it does


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS[:2])
@pytest.mark.parametrize("kind", ["feddw_cnn", "normalised"])
def test_permuting_all_clients_gives_what_computes_the_same(kind, fusion):
    side, inputs, answers = client_side(Projections, rank=8), draw(4, *INPUTS[kind], seed=99), []
    for seeds in ((), (7, 8, 9)):
        models = [model_of(kind, seed) for seed in (1, 2, 3)]
        for model, seed in zip(models, seeds, strict=False):
            permuted(model, seed)
        x, replies = replies_of(kind, models, side)
        model = models[0].eval()
        model.load_state_dict(fused(fusion, x, NeuronAlignment()(x, replies)))
        answers.append(model(inputs)[1])
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "feddw_cnn"])
def test_projections_are_those_of_the_aligned_network(kind):
    """P' = T^T P T is what a pass of the client's data through its aligned network would give."""
    side = client_side(Projections, rank=8, z=3.0)
    models = [model_of(kind, seed) for seed in (1, 2)]
    x, replies = replies_of(kind, models, side)
    aligned = NeuronAlignment()(x, replies)
    update = aligned[1].update
    models[1].load_state_dict({name: x[name] + update[name] for name in x})
    again = sent_by(side, models[1], draw(12, *INPUTS[kind], seed=11))["projections"]
    for name, values in aligned[1].payloads["projections"].items():
        expected = again[name] @ again[name].T
        torch.testing.assert_close(values @ values.T, expected, atol=2e-5, rtol=0)
    assert aligned[0] is replies[0]
    assert aligned[1].payloads["class_counts"] is replies[1].payloads["class_counts"]


def test_payloads_by_parameter_are_refused_and_a_missing_pot_names_the_extra(monkeypatch):
    params = tensors(model_of("mlp", 1))
    reply = Reply(0, 1, 1, 0.1, params, {"control_variate_delta": params})
    with refused("control_variate_delta"):
        NeuronAlignment()(params, [reply, reply])
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with refused("pip install '.[fusion]'"):
        NeuronAlignment()
