"""MA-Echo's loops against dense ones that follow the equations literally."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import strategies.maecho
from common.errors import ConfigError
from strategies.base import Reply
from strategies.fusion.min_norm import shortest
from strategies.fusion.projected_layers import masked_classifier
from strategies.fusion.projection_steps import AlongDirections, AlongInputs, PullByPull
from strategies.maecho import (
    Algorithm1,
    Equation11,
    HarmonizedOptima,
    MAEcho,
    Released,
)
from strategies.regmean import RegressionMean, regression_mean
from tests.strategies.fusion.test_projections import draw


def problem(clients: int = 4, out: int = 5, width: int = 12, rank: int = 6, seed: int = 0):
    """Random models, and projections with eigenvalues in (0, 1)."""
    local = draw(clients, out, width, seed=seed).double()
    bases = torch.linalg.qr(draw(clients, width, rank, seed=seed + 1).double()).Q
    values = torch.rand(clients, rank, generator=torch.manual_seed(seed + 2)).double()
    factors = bases * values.sqrt()[:, None]
    return local, factors


def replies_of(local: torch.Tensor, factors: torch.Tensor) -> tuple[dict, list[Reply]]:
    """As clients of one layer and a head of two classes; x is zero."""
    params = {
        "body.weight": torch.zeros_like(local[0]),
        "head.weight": torch.zeros(2, 3, dtype=local.dtype),
    }
    replies = []
    for i, (weight, values) in enumerate(zip(local, factors, strict=True)):
        payloads = {
            "projections": {"body.weight": values, "head.weight": torch.zeros(3, 1).double()},
            "projection_scales": {n: torch.ones(()) for n in ("body.weight", "head.weight")},
            "class_counts": {"counts": torch.tensor([5.0, 5.0])},
        }
        update = {"body.weight": weight, "head.weight": torch.full((2, 3), float(i)).double()}
        replies.append(Reply(i, 10, 1, 0.1, update, payloads))
    return params, replies


def fuse(aggregator: HarmonizedOptima, local: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return aggregator(*replies_of(local, factors))["body.weight"]


def dense_loop(local, factors, iterations, stride, follow, *, program=False, cap=0.5):
    """W and the V_i as they are written, with d x d projections."""
    projections = factors @ factors.transpose(1, 2)
    identity = torch.eye(local.shape[2]).double()
    model, optima = local.mean(0), local.clone()
    for _ in range(iterations):
        pulls = (model - optima) @ projections
        alpha = torch.full((len(local),), 1 / len(local)).double()
        if program:
            flat = pulls.flatten(1)
            alpha = shortest(flat @ flat.T, cap)
        model = model - stride * torch.einsum("n,nod->od", alpha, pulls)
        optima = follow(model, optima, projections, identity)
    return model, optima.mean(0)


def brute_force(gram: torch.Tensor, cap: float, steps: int = 60) -> torch.Tensor:
    """The best of a grid on the simplex, refined twice around it."""
    size, best, width = len(gram), torch.full((len(gram),), 1 / len(gram)).double(), 1.0
    for _ in range(8):
        axis = torch.linspace(-width, width, steps // (size - 1)).double()
        grid = torch.cartesian_prod(*[axis] * (size - 1)).reshape(-1, size - 1) + best[:-1]
        grid = torch.cat([grid, best[:-1][None]])
        full = torch.cat([grid, 1 - grid.sum(1, keepdim=True)], dim=1)
        full = full[((full >= -1e-12) & (full <= cap + 1e-12)).all(1)]
        best = full[torch.einsum("kn,nm,km->k", full, gram, full).argmin()]
        width /= 4
    return best


# ---- the loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 6, 12])
@pytest.mark.parametrize("step", [0.4, 1.0, 1.6])
def test_the_released_loop_in_factor_form_is_the_dense_one(rank, step):
    local, factors = problem(rank=rank)

    def follow(model, optima, projections, identity):
        return optima + step * (model - optima) @ (identity - projections)

    found = fuse(HarmonizedOptima(Released(step), 40, tolerance=0), local, factors)
    _, expected = dense_loop(local, factors, 40, step, follow)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("way", [AlongInputs, AlongDirections, PullByPull])
@pytest.mark.parametrize("loop", ["released", "algorithm 1", "eq. 11", "norm"])
def test_every_way_of_computing_a_step_is_the_dense_loop(way, loop, monkeypatch):
    """With the program's weights, and two inputs that the projections do not tell apart."""
    local, factors = problem(clients=3, out=3, width=6, rank=3)
    factors[:, 4] = factors[:, 1]
    factors = torch.linalg.qr(factors).Q * torch.tensor([0.9, 0.6, 0.3]).double()
    monkeypatch.setattr(strategies.maecho, "cheapest", lambda span, gram: way(span))

    def follow(model, optima, projections, identity):
        if loop == "eq. 11":
            return local + (model - local) @ (identity - 0.75 * projections)
        if loop == "algorithm 1":
            return optima + (model - optima) @ (identity - 0.75 * projections)
        free = (model - optima) @ (identity - projections)
        if loop == "norm":
            free = free / free.norm(dim=2, keepdim=True)
        return optima + 0.8 * free

    made = {
        "released": Released(0.8),
        "algorithm 1": Algorithm1(0.4, 3.0),
        "eq. 11": Equation11(0.4, 3.0),
        "norm": Released(0.8, normalise=True),
    }[loop]
    found = fuse(HarmonizedOptima(made, 4, "program", cap=0.6, tolerance=0), local, factors)
    model, mean = dense_loop(local, factors, 4, 0.8, follow, program=True, cap=0.6)
    expected = mean if loop in ("released", "norm") else model
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_float32_is_within_a_hundred_thousandth():
    local, factors = problem(clients=6, out=20, width=60, rank=30)
    wide = fuse(HarmonizedOptima(tolerance=0), local, factors)
    narrow = fuse(HarmonizedOptima(tolerance=0), local.float(), factors.float())
    torch.testing.assert_close(narrow.double(), wide, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mu", [1.0, 3.0, 200.0])
def test_algorithm_1_is_the_dense_one(mu):
    local, factors = problem()

    def follow(model, optima, projections, identity):
        return optima + (model - optima) @ (identity - mu / (1 + mu) * projections)

    found = fuse(HarmonizedOptima(Algorithm1(0.3, mu), 25, tolerance=0), local, factors)
    expected, _ = dense_loop(local, factors, 25, 0.6, follow)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("mu", [1.0, 200.0])
def test_equation_11_is_the_dense_one(mu):
    local, factors = problem()

    def follow(model, optima, projections, identity):
        return local + (model - local) @ (identity - mu / (1 + mu) * projections)

    found = fuse(HarmonizedOptima(Equation11(0.3, mu), 25, tolerance=0), local, factors)
    expected, _ = dense_loop(local, factors, 25, 0.6, follow)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_norm_divides_each_row():
    local, factors = problem()

    def follow(model, optima, projections, identity):
        free = (model - optima) @ (identity - projections)
        return optima + 0.05 * free / free.norm(dim=2, keepdim=True)

    loop = Released(0.05, normalise=True)
    found = fuse(HarmonizedOptima(loop, 30, tolerance=0), local, factors)
    _, expected = dense_loop(local, factors, 30, 0.05, follow)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_the_program_s_weights_are_used():
    local, factors = problem(clients=3, out=2, width=4, rank=2)

    def follow(model, optima, projections, identity):
        return optima + 0.8 * (model - optima) @ (identity - projections)

    found = fuse(
        HarmonizedOptima(Released(0.8), 3, weights="program", cap=0.6, tolerance=0), local, factors
    )
    _, expected = dense_loop(local, factors, 3, 0.8, follow, program=True, cap=0.6)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    _, uniform = dense_loop(local, factors, 3, 0.8, follow)
    assert (found - uniform).abs().max() > 0.02


def test_a_layer_that_has_settled_stops(caplog):
    local, factors = problem()
    with caplog.at_level("INFO", logger="flwr"):
        fuse(HarmonizedOptima(iterations=5000, tolerance=1e-6), local, factors)
    [iterations] = re.findall(r"(\d+) iterations", caplog.text)
    assert 27 < int(iterations) < 2000  # .6 to the 27th is 1e-6
    whole = fuse(HarmonizedOptima(iterations=5000, tolerance=0), local, factors)
    early = fuse(HarmonizedOptima(iterations=5000, tolerance=1e-7), local, factors)
    torch.testing.assert_close(early, whole, atol=1e-4, rtol=0)


# ---- what must hold ------------------------------------------------------------------------------

LOOPS = [Released(), Algorithm1(), Equation11(), Released(0.05, normalise=True)]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: type(loop).__name__)
@pytest.mark.parametrize("weights", ["uniform", "program"])
def test_identical_clients_return_their_model(loop, weights):
    _, factors = problem()
    local = draw(1, 5, 12).double().expand(4, 5, 12)
    found = fuse(HarmonizedOptima(loop, weights=weights), local, factors)
    torch.testing.assert_close(found, local[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("loop", [Released(), Algorithm1(), Equation11()])
@pytest.mark.parametrize("weights", ["uniform", "program"])
def test_zero_projections_return_the_mean(loop, weights):
    local, factors = problem()
    found = fuse(HarmonizedOptima(loop, weights=weights), local, torch.zeros_like(factors))
    torch.testing.assert_close(found, local.mean(0), atol=1e-12, rtol=0)


def test_the_order_of_clients_does_not_matter():
    local, factors = problem(clients=3)
    found = [
        fuse(HarmonizedOptima(weights="program"), local[list(order)], factors[list(order)])
        for order in itertools.permutations(range(3))
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=0)


def test_outputs_on_orthogonal_inputs_are_kept():
    """Clients whose inputs are orthogonal have a common optimum, and it is found."""
    basis = torch.linalg.qr(draw(12, 12).double()).Q
    factors = torch.stack([basis[:, :5], basis[:, 5:10]])
    local = draw(2, 4, 12, seed=3).double()
    found = fuse(HarmonizedOptima(iterations=200), local, factors)
    for weight, values in zip(local, factors, strict=True):
        torch.testing.assert_close(found @ values, weight @ values, atol=1e-6, rtol=0)
    away = local.mean(0)
    assert (away @ factors[0] - local[0] @ factors[0]).abs().max() > 0.1


@pytest.mark.parametrize("initial", ["first", "random", "regmean"])
def test_other_starts(initial):
    local, factors = problem()
    found = fuse(HarmonizedOptima(iterations=0, initial=initial), local, factors)
    torch.testing.assert_close(found, local.mean(0))  # the V_i, before any step
    moved = fuse(HarmonizedOptima(Equation11(), 0, initial=initial), local, factors)
    assert torch.equal(moved, local[0]) == (initial == "first")
    assert not torch.equal(moved, local.mean(0))


# ---- eq. 6 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("cap", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_program_against_brute_force(clients, cap, seed):
    vectors = draw(clients, 6, seed=seed).double() * torch.arange(1, clients + 1)[:, None]
    gram = vectors @ vectors.T
    found, expected = shortest(gram, cap), brute_force(gram, cap)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)
    assert found @ gram @ found <= expected @ gram @ expected + 1e-6 * gram.trace()
    assert found.sum().item() == pytest.approx(1.0)


def test_the_program_by_hand():
    """Two orthogonal vectors of lengths 1 and 2: (.8, .2); with C = .6, (.6, .4)."""
    gram = torch.tensor([[1.0, 0.0], [0.0, 4.0]]).double()
    assert shortest(gram, 1.0).tolist() == pytest.approx([0.8, 0.2], abs=1e-4)
    assert shortest(gram, 0.6).tolist() == pytest.approx([0.6, 0.4], abs=1e-4)
    assert shortest(1e12 * gram, 1.0).tolist() == pytest.approx([0.8, 0.2], abs=1e-4)


@pytest.mark.parametrize("cap", [0.1, 0.25])
def test_a_cap_that_leaves_nothing_else_gives_uniform_weights(cap):
    vectors = draw(4, 6).double()
    assert shortest(vectors @ vectors.T, cap).tolist() == [0.25] * 4


def test_where_all_is_settled_the_weights_are_uniform():
    assert shortest(torch.zeros(3, 3), 0.9).tolist() == pytest.approx([1 / 3] * 3)


def test_a_solver_that_fails_gives_uniform_weights_and_says_so(monkeypatch, caplog):
    from cvxopt import solvers

    def fail(*args, **options):
        raise ArithmeticError("singular KKT matrix")

    monkeypatch.setattr(solvers, "qp", fail)
    with caplog.at_level("WARNING", logger="flwr"):
        assert shortest(torch.eye(2), 1.0).tolist() == [0.5, 0.5]
    assert "eq. 6 was not solved" in caplog.text


# ---- the classifier ------------------------------------------------------------------------------


def test_the_classifier_s_rows_by_hand():
    """Class 0: both hold it; 1: the second; 2: one example does not count; 3: nobody."""
    params = {"head.weight": torch.full((4, 1), 10.0), "head.bias": torch.zeros(4)}
    counts = ([5.0, 0.0, 1.0, 0.0], [3.0, 2.0, 0.0, 0.0])
    replies = [
        Reply(
            i,
            1,
            1,
            0.1,
            {"head.weight": torch.full((4, 1), step), "head.bias": torch.full((4,), step)},
            {"class_counts": {"counts": torch.tensor(held)}},
        )
        for i, (step, held) in enumerate(zip((1.0, 3.0), counts, strict=True))
    ]
    found = masked_classifier(params, replies)
    assert found["head.weight"].flatten().tolist() == [12.0, 13.0, 0.0, 0.0]
    assert found["head.bias"].tolist() == [2.0, 3.0, 0.0, 0.0]
    kept = masked_classifier(params, replies, absent="keep")
    assert kept["head.weight"].flatten().tolist() == [12.0, 13.0, 10.0, 10.0]


# ---- RegMean -------------------------------------------------------------------------------------


def test_regmean_is_least_squares_on_all_inputs():
    """Each client's outputs on its own inputs, weighted by n_i / n_i: one regression."""
    from strategies.fusion.projections import SecondMoment, Spectrum, factor

    inputs = [draw(40, 6, seed=i).double() * (1 + i) for i in range(3)]
    local = draw(3, 2, 6, seed=9).double()
    factors, scales = [], []
    for rows in inputs:
        moment = SecondMoment(6, torch.device("cpu"))
        moment.add(rows)
        found, scale = moment.spectrum(), moment.mean_eigenvalue()
        values = found.values / (found.values + scale)
        factors.append(factor(Spectrum(found.vectors, values), None, 1.0).double())
        scales.append(scale)
    params, replies = replies_of(local, factors)
    for reply, scale in zip(replies, scales, strict=True):
        reply.payloads["projection_scales"]["body.weight"] = scale
    outputs = torch.cat([rows @ w.T for rows, w in zip(inputs, local, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.T
    found = RegressionMean(shrinkage=1.0, classifier="masked")(params, replies)["body.weight"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_regmean_of_identical_clients_is_their_model():
    local = draw(1, 5, 12).double().expand(4, 5, 12)
    _, factors = problem(rank=12)
    params, replies = replies_of(local, factors)
    found = RegressionMean(classifier="masked")(params, replies)["body.weight"]
    torch.testing.assert_close(found, local[0], atol=1e-8, rtol=0)


def test_regmean_at_shrinkage_0_weighs_every_input_by_itself():
    """Diagonal moments (1, 3) and (3, 1) of inputs 1 and 2 on weights 4 and 8: (7, 5)."""
    from strategies.fusion.projected_layers import Layer

    values = torch.tensor([[1.0, 3.0], [3.0, 1.0]]).double()
    layer = Layer(
        "body.weight",
        torch.tensor([[[4.0, 4.0]], [[8.0, 8.0]]]).double(),
        torch.eye(2).double().expand(2, 2, 2),
        values / (values + 2.0),
        torch.tensor([2.0, 2.0]).double(),
        torch.tensor([10.0, 10.0]).double(),
    )
    assert regression_mean(layer, 0.0).tolist() == [[pytest.approx(7.0), pytest.approx(5.0)]]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: HarmonizedOptima(iterations=-1), "iterations"),
        (lambda: HarmonizedOptima(weights="best"), "weights"),
        (lambda: HarmonizedOptima(initial="last"), "initial"),
        (lambda: HarmonizedOptima(cap=0.0), "cap"),
        (lambda: Released(2.5), "step"),
        (lambda: Algorithm1(0.0), "eta"),
        (lambda: Equation11(0.5, -1.0), "mu"),
    ],
)
def test_values_out_of_range_name_their_key(make, key):
    with pytest.raises(ConfigError, match=rf"strategy\.maecho\.{key}"):
        make()


def test_the_strategy_has_its_parts():
    strategy = MAEcho(rank=3, local_lr=0.01)
    assert strategy.client_sides["projections"].rank == 3
    assert isinstance(strategy.server_step.aggregator, HarmonizedOptima)
