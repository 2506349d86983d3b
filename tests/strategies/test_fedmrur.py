"""The Lorentz distance against its definition, and FedMRUR's term."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from fedhet.strategies.base import Step
from fedhet.strategies.components.local_training import train_locally
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.fedmrur import FedMRUR, ManifoldRegularizer, growth, lorentz_distance
from tests.federation import TensorBatches
from tests.strategies.labelled import WithoutDropout, context_of
from tests.strategies.sides import client_side, sam


def by_definition(left, right, beta):
    """Eq. 3 and 4 on the lifted vectors."""
    first = (beta + left.square().sum(1)).sqrt() * (beta + right.square().sum(1)).sqrt()
    return -2 * beta - 2 * ((left * right).sum(1) - first)


def pair(scale, apart):
    generator = torch.Generator().manual_seed(0)
    left = scale * torch.randn(8, 64, generator=generator)
    return left, left + apart * torch.randn(8, 64, generator=generator)


def test_the_distance_by_hand_by_definition_and_in_its_limits():
    """beta 16: z = 3 is lifted to (5, 3), 0 to (4, 0): -32 - 2 (-20) = 8."""
    assert lorentz_distance(torch.tensor([[3.0]]), torch.zeros(1, 1), 16.0).item() == 8.0
    left, right = (rows.double() for rows in pair(2.0, 1.0))
    for beta in (0.1, 1.0, 10.0):
        found, expected = (d(left, right, beta) for d in (lorentz_distance, by_definition))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    left, right = pair(3.0, 1.0)
    euclidean = (left - right).square().sum(1)
    small, large = lorentz_distance(left, right, 1.0), lorentz_distance(left, right, 1e6)
    assert (small <= euclidean).all()
    assert small.sum() < 0.99 * euclidean.sum()
    torch.testing.assert_close(large, euclidean, rtol=1e-3, atol=0)
    left = pair(1e4, 0.0)[0].requires_grad_()
    distance = lorentz_distance(left, left.detach())
    distance.sum().backward()
    assert torch.equal(distance, torch.zeros(8))
    assert torch.equal(left.grad, torch.zeros_like(left))


def test_float32_is_as_good_as_float64():
    """To a millionth of ||z - z'||^2. Eq. 3 itself is off by more than all of it."""
    for scale, apart in itertools.product((1e-3, 1.0, 1e3, 1e6), (1e-2, 1.0, 1e2)):
        left, right = pair(scale, apart)
        exact = lorentz_distance(left.double(), right.double())
        error = (lorentz_distance(left, right).double() - exact).abs()
        assert (error <= 1e-6 * (left - right).double().square().sum(1)).all()


def test_growth_is_exp_and_then_its_tangent():
    values = torch.tensor([0.0, 1.0, 19.9, 21.0, 1e6], dtype=torch.float64).requires_grad_()
    grown = growth(values, 1.0)
    grown.sum().backward()
    top = math.exp(20.0)
    expected = [1.0, math.e, math.exp(19.9), 2 * top, top * (1 + 1e6 - 20)]
    torch.testing.assert_close(grown, torch.tensor(expected, dtype=torch.float64))
    slopes = [1.0, math.e, math.exp(19.9), top, top]
    torch.testing.assert_close(values.grad, torch.tensor(slopes, dtype=torch.float64))


def penalty_of(side, context, inputs):
    features, logits = context.model(inputs)
    return side.penalty(Step(context.params, inputs, None, features, logits, context))


def test_the_term_by_hand():
    """beta 16, sigma 4, features 3 and 0 against received 0 and 0: gamma (e^2 + 1) / 2."""
    context = context_of(WithoutDropout())
    inputs = torch.zeros(2, 3)
    context._received = (inputs, torch.zeros(2, 1))
    step = SimpleNamespace(features=torch.tensor([[3.0], [0.0]]), inputs=inputs, context=context)
    penalty = client_side(FedMRUR, gamma=0.1, sigma=4.0, beta=16.0).penalty(step)
    assert penalty.item() == pytest.approx(0.1 * (math.exp(2) + 1) / 2)
    assert context.measurements() == {"lorentz-distance": pytest.approx(4.0)}
    euclidean = client_side(FedMRUR, gamma=0.1, sigma=4.0, space="euclidean").penalty(step)
    assert euclidean.item() == pytest.approx(0.1 * (math.exp(9 / 4) + 1) / 2)


def test_the_second_pass_of_sam_is_not_measured():
    """It is at y + e. The mean is of both steps' first passes alone."""
    inputs, seen = torch.eye(4), []

    class Watching(ManifoldRegularizer):
        def penalty(self, step):
            distance = lorentz_distance(step.features, step.context.received_features(step.inputs))
            seen.append(float(distance.detach().mean()))
            return super().penalty(step)

    context = context_of(WithoutDropout(), TensorBatches(inputs, torch.tensor([0, 1, 0, 1])))
    options = LocalTrainingConfig(batch_size=4, epochs=2)
    train_locally(
        context,
        [Watching(0.1, 1e4, 1.0, "lorentz", "representation")],
        sam(rho=0.5),
        options,
        torch.Generator(),
    )
    assert len(seen) == 4
    assert seen[1] > 0.0  # where e is
    measured = context.measurements()["lorentz-distance"]
    assert measured == pytest.approx((seen[0] + seen[2]) / 2, abs=1e-9)


def test_data_is_lifted_with_its_representation():
    context = context_of(WithoutDropout().double())
    inputs = torch.randn(4, 4, generator=torch.manual_seed(3), dtype=torch.float64)
    received = context.received_features(inputs)
    context.model.body[0].weight.data.add_(0.3)
    features = context.model(inputs)[0].detach()
    side = client_side(FedMRUR, gamma=1.0, sigma=2.0, beta=0.7, lifts="data")
    whole = [torch.cat([inputs, rows], dim=1) for rows in (features, received)]
    expected = torch.exp(by_definition(*whole, 0.7) / 2).mean()
    found = penalty_of(side, context, inputs)
    torch.testing.assert_close(found, expected.to(found), rtol=1e-5, atol=0)
