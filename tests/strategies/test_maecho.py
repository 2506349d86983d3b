"""MA-Echo's loops against dense ones that follow the equations literally."""

import pytest
import torch

from fedhet.strategies.base import Reply
from fedhet.strategies.fusion.maecho_iterates import min_norm_weights
from fedhet.strategies.fusion.projections import masked_classifier
from fedhet.strategies.maecho import HarmonizedOptima, MAEcho
from tests.federation import federate
from tests.strategies.fusion.test_projections import draw
from tests.strategies.labelled import blobs


def problem(clients: int = 4, out: int = 5, width: int = 12, rank: int = 6, seed: int = 0):
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
            "projection_scales": dict.fromkeys(params, torch.ones(())),
            "class_counts": {"counts": torch.tensor([5.0, 5.0])},
        }
        update = {"body.weight": weight, "head.weight": torch.full((2, 3), float(i)).double()}
        replies.append(Reply(i, 10, 1, 0.1, update, payloads))
    return params, replies


def fuse(local: torch.Tensor, factors: torch.Tensor, **given) -> torch.Tensor:
    return HarmonizedOptima(MAEcho(**given))(*replies_of(local, factors))["body.weight"]


LOOPS = {
    "released": {"step": 0.8},
    "short steps": {"step": 0.4},
    "long steps": {"step": 1.6},
    "norm": {"step": 0.8, "normalise": True},
    "algorithm 1": {"loop": "algorithm1", "eta": 0.4, "mu": 3.0},
    "eq. 11": {"loop": "equation11", "eta": 0.4, "mu": 3.0},
}
STEPS = {"short steps": 0.4, "long steps": 1.6}  # of the others .8


def dense_result(loop, local, factors, iterations, *, program=False, cap=0.5) -> torch.Tensor:
    """The loops of LOOPS as they are written, with d x d projections."""
    projections = factors @ factors.transpose(1, 2)
    held = torch.eye(local.shape[2]).double() - 0.75 * projections
    model, optima, step = local.mean(0), local.clone(), STEPS.get(loop, 0.8)
    for _ in range(iterations):
        pulls = (model - optima) @ projections
        alpha = torch.full((len(local),), 1 / len(local)).double()
        if program:
            flat = pulls.flatten(1)
            alpha = min_norm_weights(flat @ flat.T, cap)
        model = model - step * torch.einsum("n,nod->od", alpha, pulls)
        if loop == "eq. 11":
            optima = local + (model - local) @ held
        elif loop == "algorithm 1":
            optima = optima + (model - optima) @ held
        else:
            free = (model - optima) - (model - optima) @ projections
            if loop == "norm":
                free = free / free.norm(dim=2, keepdim=True)
            optima = optima + step * free
    return model if loop in ("algorithm 1", "eq. 11") else optima.mean(0)


@pytest.mark.parametrize("rank", [1, 6, 12])  # of 12: moves by row, and on the inputs
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_in_factor_form_is_the_dense_one(loop, rank):
    local, factors = problem(rank=rank)
    factors[1, :, -1] = 0.0  # the first and second client send projections of other ranks
    found = fuse(local, factors, **LOOPS[loop], iterations=25, tolerance=0.0)
    expected = dense_result(loop, local, factors, 25)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rank", [3, 5])  # of 5 inputs that the projections tell apart
@pytest.mark.parametrize("loop", [name for name in LOOPS if name not in STEPS])
def test_a_loop_with_the_program_s_weights_is_the_dense_one(loop, rank):
    """Two of the six inputs have equal projections and are merged."""
    local, factors = problem(clients=3, out=3, width=6, rank=rank)
    factors[:, 4] = factors[:, 1]
    factors = torch.linalg.qr(factors).Q * torch.linspace(0.9, 0.3, rank).double()
    given = {"iterations": 4, "weights": "program", "cap": 0.6, "tolerance": 0.0}
    found = fuse(local, factors, **LOOPS[loop], **given)
    expected = dense_result(loop, local, factors, 4, program=True, cap=0.6)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (found - dense_result(loop, local, factors, 4)).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["long steps", "norm"])
@pytest.mark.parametrize("rank", [8, 30])  # of 60; 6 clients have 48 directions or 180
def test_float32_is_within_a_hundred_thousandth(loop, rank):
    local, factors = problem(clients=6, out=20, width=60, rank=rank)
    found = fuse(local.float(), factors.float(), **LOOPS[loop], iterations=300, tolerance=0.0)
    expected = dense_result(loop, local, factors, 300)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float16, 2e-3), (torch.float64, 1e-5)])
def test_a_model_of_another_type_is_fused_in_the_projections_type_at_least(dtype, within):
    """Clients send float32 projections whatever their model is."""
    local, factors = problem()
    expected = fuse(local, factors)
    found = fuse(local.to(dtype), factors.float())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=within, rtol=0)


def test_a_layer_that_has_settled_stops():
    early, later, whole = (
        fuse(*problem(), iterations=count, tolerance=tolerance)
        for count, tolerance in ((500, 1e-7), (1000, 1e-7), (1000, 0.0))
    )
    assert torch.equal(early, later)
    assert not torch.equal(early, whole)
    torch.testing.assert_close(early, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("weights", ["uniform", "program"])
def test_identical_clients_return_their_model_and_zero_projections_the_mean(loop, weights):
    (local, factors), given = problem(), {"weights": weights, **LOOPS[loop]}
    found = fuse(local[:1].expand(4, 5, 12), factors, **given)
    torch.testing.assert_close(found, local[0], atol=1e-12, rtol=0)
    if loop != "norm":
        found = fuse(local, torch.zeros_like(factors), **given)
        torch.testing.assert_close(found, local.mean(0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("initial", ["first", "random", "regmean"])
def test_w_starts_where_initial_says(initial):
    local, factors = problem()
    given = {"iterations": 0, "initial": initial, "projections": {"form": "ridge"}}
    found = fuse(local, factors, **given)
    torch.testing.assert_close(found, local.mean(0))  # the V_i, before any step
    moved = fuse(local, factors, loop="equation11", **given)
    assert torch.equal(moved, local[0]) == (initial == "first")
    assert not torch.equal(moved, local.mean(0))


def test_a_class_s_row_is_the_mean_over_its_holders_by_hand():
    """Class 0: both hold it; 1: the second; 2: one example does not count; 3: nobody."""
    params = {"head.weight": torch.full((4, 1), 10.0), "head.bias": torch.zeros(4)}
    counts = ([5.0, 0.0, 1.0, 0.0], [3.0, 2.0, 0.0, 0.0])
    replies = []
    for i, (step, held) in enumerate(zip((1.0, 3.0), counts, strict=True)):
        update = {name: torch.full_like(value, step) for name, value in params.items()}
        payloads = {"class_counts": {"counts": torch.tensor(held)}}
        replies.append(Reply(i, 1, 1, 0.1, update, payloads))
    found = masked_classifier(params, replies)
    assert found["head.weight"].flatten().tolist() == [12.0, 13.0, 0.0, 0.0]
    assert found["head.bias"].tolist() == [2.0, 3.0, 0.0, 0.0]
    kept = masked_classifier(params, replies, absent="keep")
    assert kept["head.weight"].flatten().tolist() == [12.0, 13.0, 10.0, 10.0]


class Linear(torch.nn.Module):
    """Its widest layers have 4 inputs and a bias: 5 columns, of which all may be needed."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def forward(self, inputs):
        features = self.body(inputs)
        return features, self.head(features)


def test_the_widest_layer_may_have_a_bias_and_a_projection_of_full_rank():
    _, reports = federate(
        MAEcho(projections={"rank": 5}),
        blobs(2),
        model=Linear,
        loss=torch.nn.functional.cross_entropy,
        rounds=1,
    )
    assert len(reports[-1].clients) == 2
