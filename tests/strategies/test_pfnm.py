"""PFNM and FedMA: the assignment against a plain one, the grown networks by hand and reduction."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file

from fedhet.conf import compose, plain_part
from fedhet.strategies.base import Reply
from fedhet.strategies.ensemble import ensemble_of
from fedhet.strategies.fedma import FedMA
from fedhet.strategies.fusion.grown_network import (
    GrownNetwork,
    Neurons,
    assign,
    grown_network,
    match,
)
from fedhet.strategies.pfnm import PFNM
from fedhet.strategies.round.server_model import ServerModel
from fedhet.tasks import build_task
from fedhet.tasks.evaluation import evaluate_model
from tests.recipes import TINY, overrides, run_recipe
from tests.refused import refused
from tests.strategies.fusion.test_layer_chain import tensors
from tests.strategies.fusion.test_neuron_alignment import INPUTS, model_of, permuted
from tests.strategies.fusion.test_projections import draw
from tests.strategies.sides import built, parts_of

METHODS = {"mlp": PFNM, "feddw_cnn": FedMA}


def neurons_of(rows, precisions, mean: float | torch.Tensor = 0.0, precision=0.5) -> Neurons:
    """Of rows of each client, with one precision for all of them or one by client and column."""
    rows = [torch.as_tensor(values).double() for values in rows]
    like = torch.zeros(rows[0].shape[1]).double()
    precisions = torch.as_tensor(precisions).double() + like.expand(len(rows), -1)
    return Neurons(rows, precisions, like + mean, like + precision)


def score(neurons: Neurons, j: int, label: list[int], others: dict[int, list[int]], gamma: float):
    """The total that a client's labels are worth, neuron by neuron and number by number."""
    clients, total = len(neurons.rows), 0.0
    size = 1 + max(max(labels) for labels in others.values())
    for row, i in zip(neurons.rows[j], label, strict=True):
        holders = [(k, labels.index(i)) for k, labels in others.items() if i in labels]
        for column, own in enumerate(neurons.precisions[j]):
            precision, mean = neurons.precision[column], neurons.mean[column]
            known = precision + sum(neurons.precisions[k][column] for k, _ in holders)
            summed = mean * precision + sum(
                neurons.rows[k][held][column] * neurons.precisions[k][column] for k, held in holders
            )
            joint = (row[column] * own + summed) ** 2 / (own + known)
            total += float(joint - summed**2 / known)
        if i < size:
            count = min(len(holders), 10)
            total += math.log(count / (clients - count))
        else:
            total += 2 * math.log(gamma / clients) - 2 * math.log(i - size + 1)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.3, 5.0])
@pytest.mark.parametrize("most", [4, 5, 99])
@pytest.mark.parametrize("seed", range(2))
def test_a_client_s_assignment_is_the_best_of_all(gamma, most, seed):
    """Two clients, the second of 3 neurons against all injective labels of 4 global ones."""
    rows = [2.0 * draw(4, 2, seed=seed), 2.0 * draw(3, 2, seed=seed + 9)]
    neurons = neurons_of(rows, [[1.0, 2.0], [0.5, 4.0]], draw(2, seed=77).double())
    labels = match(neurons, gamma, most, 0, torch.Generator())
    assert labels[0].tolist() == [0, 1, 2, 3]
    fresh = min(3, max(0, most - 4))
    allowed = itertools.permutations(range(4 + fresh), 3)
    best = max(score(neurons, 1, list(label), {0: [0, 1, 2, 3]}, gamma) for label in allowed)
    found = labels[1].tolist()
    fresh = [i for i in found if i >= 4]
    assert fresh == list(range(4, 4 + len(fresh)))  # in the order of the rows, so k may differ
    orders = (dict(zip(fresh, order, strict=True)) for order in itertools.permutations(fresh))
    totals = [
        score(neurons, 1, [order.get(i, i) for i in found], {0: [0, 1, 2, 3]}, gamma)
        for order in orders
    ]
    assert max(totals) == pytest.approx(best)


def test_after_the_sweeps_no_client_has_a_better_assignment():
    """And no label is unused."""
    rows = [draw(5, 3, seed=seed) for seed in range(4)]
    neurons = neurons_of(rows, 1.0, draw(3, seed=77).double())
    labels = [label.tolist() for label in match(neurons, 2.0, 99, 20, torch.Generator())]
    assert set(itertools.chain(*labels)) == set(range(1 + max(itertools.chain(*labels))))
    for j in range(4):
        kept = {k: label for k, label in enumerate(labels) if k != j}
        used = sorted(set(itertools.chain(*kept.values())))
        others = {k: [used.index(i) for i in label] for k, label in kept.items()}
        fresh = itertools.count(len(used))
        own = [used.index(i) if i in used else next(fresh) for i in labels[j]]
        given = {k: torch.tensor(label) for k, label in others.items()}
        best = assign(neurons, j, given, 2.0, 99).tolist()
        now, then = (score(neurons, j, label, others, 2.0) for label in (own, best))
        assert then == pytest.approx(now)


def test_a_column_of_precision_zero_has_no_effect():
    """A client's weights to a class that it has no example of do not count."""
    rows = [[1.0, 9.0], [-1.0, 4.0]], [[-1.0, 9.0], [1.0, 4.0]]
    for second, expected in ((0.0, [1, 0]), (100.0, [0, 1])):
        neurons = neurons_of(rows, [[100.0, second]] * 2, precision=1.0)
        assert match(neurons, 1e-9, 2, 3, torch.Generator())[1].tolist() == expected


def test_a_neuron_s_clients_are_counted_to_ten():
    """Of 13 clients 12 have a neuron: log(10 / 3) is worth less than a new one, log(12) more."""
    # with hardly any prior equal rows are worth the same together and apart
    neurons = neurons_of([[[1.0]]] * 13, 1.0, precision=1e-9)
    others = {j: torch.tensor([0]) for j in range(12)}
    for between, expected in ((math.log(10 / 3) + 0.1, 1), (math.log(10 / 3) - 0.1, 0)):
        gamma = 13 * math.exp(between / 2)
        assert assign(neurons, 12, others, gamma, 99).tolist() == [expected]


def reply_of(i: int, params: dict, counts: list[float]) -> Reply:
    return Reply(i, 1, 1, 0.1, params, {"class_counts": {"counts": torch.tensor(counts)}})


def grown(output: GrownNetwork, kind: str, models: list, counts: list | None = None):
    """Return the network that clients with these models give; x is zero."""
    output.bind(ServerModel(models[0], INPUTS[kind], 10))
    x = {name: torch.zeros_like(value) for name, value in tensors(models[0]).items()}
    counts = counts or [[3.0] * 10 for _ in models]
    replies = [reply_of(i, tensors(m), counts[i]) for i, m in enumerate(models)]
    output_model = output(x, x, x, replies)
    return output_model, output.build_model(output_model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_one_network_in_three_orders_comes_out_as_it_is(kind):
    """Hardly any prior and a small mass: no neuron is new, and none is shrunk."""
    models = [model_of(kind, 1), *(permuted(model_of(kind, 1), seed) for seed in (2, 3))]
    expected = tensors(model_of(kind, 1))
    output = parts_of(METHODS[kind], sigma=1e-3, sigma0=1e4, gamma=1e-3, sweeps=1).output
    output_model, _ = grown(output, kind, models)
    for name, value in expected.items():
        torch.testing.assert_close(output_model[f"grown.{name}"], value, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_neurons_that_all_are_new_stand_side_by_side(kind):
    """Nothing is matched and nothing shrunk: the logits are the sum, by shares of the classes."""
    models = [model_of(kind, seed).eval() for seed in (1, 2)]
    for name, value in itertools.chain(*(model.named_parameters() for model in models)):
        if name.endswith("bias"):
            value.data.zero_()
    counts = [[1.0, 3.0, 0.0, 0.0, 5.0] * 2, [1.0, 1.0, 7.0, 0.0, 0.0] * 2]
    output = parts_of(
        METHODS[kind], sigma=1e-9, sigma0=1e9, gamma=1e9, max_neurons=10_000, sweeps=1
    ).output
    _, network = grown(output, kind, models, counts)
    inputs = draw(4, *INPUTS[kind])
    shares = torch.tensor(counts) / torch.tensor(counts).sum(0).clamp_min(1.0)
    logits = [model(inputs)[1] for model in models]
    if kind == "feddw_cnn":
        expected = sum(share * logit for share, logit in zip(shares, logits, strict=True))
    else:  # weights to a class that the other has not are its own, whatever its share
        expected = sum((share > 0) * logit for share, logit in zip(shares, logits, strict=True))
        expected[:, [3, 8]] += 0.1  # nobody has them: what is left is the prior of the bias
    torch.testing.assert_close(network(inputs)[1], expected, atol=1e-4, rtol=1e-4)


def assert_grown(output: GrownNetwork, layer: str, *models: list, expected: list) -> None:
    """Of clients with 3 and 1 examples of class 0, and 6 and 0 of class 1; x is zero.

    Models are lists of the layer's weight and bias, and of the head's.
    """
    names = [f"{layer}.weight", f"{layer}.bias", "head.weight", "head.bias"]
    first, second = (dict(zip(names, map(torch.tensor, model), strict=True)) for model in models)
    x = {name: torch.zeros_like(value) for name, value in first.items()}
    found = output(x, x, x, [reply_of(0, first, [3.0, 6.0]), reply_of(1, second, [1.0, 0.0])])
    for name, values in zip(names, expected, strict=True):
        torch.testing.assert_close(found[f"grown.{name}"], torch.tensor(values))


def test_pfnm_by_hand():
    """Two clients of one hidden layer with two neurons, sigma = sigma0 = 1, matched crosswise.

    Their weights to class 0 count 3/4 and 1/4, to class 1, which only the first has, 1 and 0.
    """
    first = [[[4.0], [-4.0]], [1.0, 0.0], [[2.0, 0.0], [1.0, 5.0]], [1.0, 2.0]]
    second = [[[-5.0], [3.0]], [2.0, -1.0], [[4.0, 8.0], [7.0, 7.0]], [5.0, 9.0]]
    expected = [
        [[7 / 3], [-9 / 3]],
        [(1 - 1 + 0.1) / 3, (0 + 2 + 0.1) / 3],
        [[(1.5 + 2) / 2, (0 + 1) / 2], [1 / 2, 5 / 2]],
        [(0.75 + 1.25 + 0.1) / 2, (2 + 0 + 0.1) / 2],
    ]
    assert_grown(parts_of(PFNM).output, "body.1", first, second, expected=expected)


def test_fedma_by_hand():
    """The same by incoming weights alone, of a convolution, and with the mean classifier."""
    heads = [[2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 5.0, 5.0]], [[4.0, 0.0, 8.0, 4.0], [7.0] * 4]
    first = [[[[[4.0]]], [[[-4.0]]]], [1.0, 0.0], heads[0], [1.0, 2.0]]
    second = [[[[[-5.0]]], [[[3.0]]]], [2.0, -1.0], heads[1], [5.0, 9.0]]
    mean = [0.75 * 2 + 0.25 * 8, 0.75 * 1 + 0.25 * 4, 0.25 * 4, 0.75 * 1]
    expected = [
        [[[[7 / 3]]], [[[-9 / 3]]]],
        [(1 - 1 + 0.1) / 3, (0 + 2 + 0.1) / 3],
        [mean, [1.0, 1.0, 5.0, 5.0]],
        [0.75 * 1 + 0.25 * 5, 2.0],
    ]
    assert_grown(parts_of(FedMA).output, "body.0", first, second, expected=expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_layers_grow_up_to_max_neurons(kind):
    models = [model_of(kind, seed) for seed in (1, 2, 3)]
    output = parts_of(METHODS[kind], sigma=1e-6, gamma=50.0, max_neurons=150, sweeps=1).output
    output_model, network = grown(output, kind, models)
    for name, own in tensors(models[0]).items():
        if len(own) > 50:
            assert len(output_model[f"grown.{name}"]) == max(150, len(own))
    layers = [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
    assert [m.weight.shape for m in layers] == [(m.out_features, m.in_features) for m in layers]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfnm", "fedma", "ensemble"])
def test_what_is_stored_is_the_network_that_was_evaluated(method, tmp_path):
    words = [*TINY, f"strategy={method}", "rounds=1", "local.initial=own"]
    if method != "ensemble":
        words += [f"strategy.{method}.sigma=0.1", f"strategy.{method}.sweeps=1"]
    summary = run_recipe(tmp_path, *words)
    stored = load_file(tmp_path / "model.safetensors")
    recipe = compose(overrides(*words))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=0, num_clients=3)
    made, model = (ensemble_of if method == "ensemble" else grown_network), task.build_model(8)
    found = evaluate_model(made(stored, model), task.test_data(torch.device("cpu")), task.loss)
    assert found == pytest.approx((summary["loss"], summary["accuracy"]), rel=1e-5)


def test_pfnm_refuses_convolutions_both_refuse_norms_and_have_their_papers_gamma():
    with refused("strategy=fedma"):
        built(PFNM, server_model=ServerModel(model_of("feddw_cnn", 1), INPUTS["feddw_cnn"], 10))
    with refused("body.0.weight", "body.1"):
        built(FedMA, server_model=ServerModel(model_of("normalised", 1), INPUTS["normalised"], 10))
    network = ServerModel(model_of("mlp", 1), INPUTS["mlp"], 10)
    assert built(PFNM, server_model=network).server_step.output.how.gamma == 1.0
    assert built(FedMA, server_model=network).server_step.output.how.gamma == 7.0
