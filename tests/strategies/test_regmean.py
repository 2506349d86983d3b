"""RegMean against least squares and by hand."""

from dataclasses import replace

import pytest
import torch

from fedhet.strategies.fusion.input_statistics import SecondMoment, Spectrum
from fedhet.strategies.fusion.projections import Layer
from fedhet.strategies.regmean import RegressionMean, regression_mean
from tests.strategies.fusion.test_projections import draw
from tests.strategies.test_maecho import replies_of


def fused_and_outputs(inputs: list[torch.Tensor], local: torch.Tensor):
    """Return RegMean's layer at shrinkage 1, and all clients' outputs on their inputs."""
    factors, scales = [], []
    for rows in inputs:
        moment = SecondMoment(rows.shape[1], torch.device("cpu"))
        moment.add(rows)
        found, scale = moment.spectrum(), moment.mean_eigenvalue()
        values = found.values / (found.values + scale)
        factors.append(Spectrum(found.vectors, values).factor(None, 1.0).double())
        scales.append(scale)
    params, replies = replies_of(local, factors)
    for i, (rows, scale) in enumerate(zip(inputs, scales, strict=True)):
        replies[i] = replace(replies[i], num_examples=len(rows))
        replies[i].payloads["projection_scales"]["body.weight"] = scale
    found = RegressionMean(1.0, "masked")(params, replies)["body.weight"]
    outputs = [rows @ w.T for rows, w in zip(inputs, local, strict=True)]
    return found.double(), torch.cat(outputs)


def test_regmean_is_least_squares_on_all_inputs():
    """Of each client's outputs on its own inputs, clients weighted by n_i."""
    inputs = [draw(20 + 10 * i, 6, seed=i).double() * (1 + i) for i in range(3)]
    found, outputs = fused_and_outputs(inputs, draw(3, 2, 6, seed=9).double())
    expected = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.T
    torch.testing.assert_close(found, expected.float().double(), atol=1e-5, rtol=0)


def test_a_layer_that_no_client_s_model_calls_is_the_mean():
    local, one = draw(2, 2, 6), torch.ones(2)
    layer = Layer("body.weight", local, torch.zeros(2, 6, 1), torch.zeros(2, 1), one, one)
    assert torch.equal(regression_mean(layer), local.mean(0))


def test_inputs_that_hardly_vary_do_not_blow_the_layer_up():
    """Of variances from 1 down to 2^-48, float32 tells apart those above its resolution."""
    scales = 0.5 ** torch.arange(25)
    axes = torch.linalg.qr(draw(60, 60, seed=5).double()).Q[:, :25].T
    inputs = [(draw(100, 25, seed=i) * scales).double() @ axes for i in range(3)]
    found, outputs = fused_and_outputs(inputs, draw(3, 2, 60, seed=9).double())
    errors = (torch.cat(inputs) @ found.T - outputs).norm() / outputs.norm()
    best = torch.linalg.lstsq(torch.cat(inputs), outputs, driver="gelsd").solution
    least = (torch.cat(inputs) @ best - outputs).norm() / outputs.norm()
    assert errors < 1.1 * least
    assert found.norm() < 1e3  # 6e5 if rounding is inverted


def test_regmean_at_shrinkage_0_weighs_every_input_by_itself():
    """Diagonal moments (1, 3) and (3, 1) of inputs 1 and 2 on weights 4 and 8: (7, 5)."""
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
