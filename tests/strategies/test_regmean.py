"""RegMean against least squares and by hand."""

from dataclasses import replace

import pytest
import torch

from fedhet.strategies.fusion.input_statistics import SecondMoment, Spectrum
from fedhet.strategies.fusion.projected_layers import Layer
from fedhet.strategies.regmean import RegressionMean, regression_mean
from tests.strategies.fusion.test_projections import draw
from tests.strategies.test_maecho import replies_of


def test_regmean_is_least_squares_on_all_inputs():
    """Of each client's outputs on its own inputs, clients weighted by n_i."""
    inputs = [draw(20 + 10 * i, 6, seed=i).double() * (1 + i) for i in range(3)]
    local = draw(3, 2, 6, seed=9).double()
    factors, scales = [], []
    for rows in inputs:
        moment = SecondMoment(6, torch.device("cpu"))
        moment.add(rows)
        found, scale = moment.spectrum(), moment.mean_eigenvalue()
        values = found.values / (found.values + scale)
        factors.append(Spectrum(found.vectors, values).factor(None, 1.0).double())
        scales.append(scale)
    params, replies = replies_of(local, factors)
    for i, (rows, scale) in enumerate(zip(inputs, scales, strict=True)):
        replies[i] = replace(replies[i], num_examples=len(rows))
        replies[i].payloads["projection_scales"]["body.weight"] = scale
    outputs = torch.cat([rows @ w.T for rows, w in zip(inputs, local, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.T
    found = RegressionMean(shrinkage=1.0, classifier="masked")(params, replies)["body.weight"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


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
