"""The Lorentz distance against its definition, and FedMRUR's reductions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from client_app.training import train_locally
from strategies.base import LocalContext, Step
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.fedmrur import FedMRUR, ManifoldRegularizer, growth, lorentz_distance
from strategies.fedsam import SAM
from tests.federation import TensorBatches, federate
from tests.strategies.test_reductions import PLAIN_MEAN, WithoutDropout, blobs


def by_definition(left, right, beta):
    """Eq. 3 and 4 on the lifted vectors, in float64."""
    left, right = left.double(), right.double()

    def lifted(rows):
        return torch.cat([(beta + rows.square().sum(1, keepdim=True)).sqrt(), rows], dim=1)

    x, y = lifted(left), lifted(right)
    product = -x[:, 0] * y[:, 0] + (x[:, 1:] * y[:, 1:]).sum(1)
    return -2 * beta - 2 * product


def pair(scale: float, apart: float, size: int = 64):
    generator = torch.Generator().manual_seed(0)
    left = scale * torch.randn(8, size, generator=generator)
    return left, left + apart * torch.randn(8, size, generator=generator)


# ---- the distance --------------------------------------------------------------------------------


def test_the_distance_by_hand():
    """beta 16: z = 3 is lifted to (5, 3), 0 to (4, 0): -32 - 2 (-20) = 8."""
    assert lorentz_distance(torch.tensor([[3.0]]), torch.zeros(1, 1), 16.0).item() == 8.0


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_the_distance_is_the_definition(beta):
    left, right = (rows.double() for rows in pair(2.0, 1.0))
    torch.testing.assert_close(
        lorentz_distance(left, right, beta), by_definition(left, right, beta), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("apart", [1e-2, 1.0, 1e2])
def test_float32_is_as_good_as_float64(scale, apart):
    """To a millionth of ||z - z'||^2. Eq. 3 as it stands is off by more than all of it."""
    left, right = pair(scale, apart)
    exact = lorentz_distance(left.double(), right.double())
    error = (lorentz_distance(left, right).double() - exact).abs()
    assert (error <= 1e-6 * (left - right).double().square().sum(1)).all()


def test_equal_features_have_distance_zero_and_gradient_zero():
    left = pair(1e4, 0.0)[0].requires_grad_()
    distance = lorentz_distance(left, left.detach())
    distance.sum().backward()
    assert torch.equal(distance, torch.zeros(8))
    assert torch.equal(left.grad, torch.zeros_like(left))


def test_the_distance_is_at_most_euclidean_and_grows_towards_it_with_beta():
    left, right = pair(3.0, 1.0)
    euclidean = (left - right).square().sum(1)
    small, large = lorentz_distance(left, right, 1.0), lorentz_distance(left, right, 1e6)
    assert (small <= euclidean).all()
    assert small.sum() < 0.99 * euclidean.sum()
    torch.testing.assert_close(large, euclidean, rtol=1e-3, atol=0)


# ---- the term ------------------------------------------------------------------------------------


def test_growth_is_exp_and_then_its_tangent():
    values = torch.tensor([0.0, 1.0, 19.9, 21.0, 1e6], dtype=torch.float64).requires_grad_()
    grown = growth(values, 1.0)
    grown.sum().backward()
    top = math.exp(20.0)
    expected = [1.0, math.e, math.exp(19.9), 2 * top, top * (1 + 1e6 - 20)]
    torch.testing.assert_close(grown, torch.tensor(expected, dtype=torch.float64))
    slopes = [1.0, math.e, math.exp(19.9), top, top]
    torch.testing.assert_close(values.grad, torch.tensor(slopes, dtype=torch.float64))


class Features(nn.Module):
    """Inputs times a matrix are the features; it counts its forward passes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(5, 2)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(scale * torch.randn(param.shape, generator=torch.manual_seed(i)))
        self.passes = 0

    def forward(self, inputs):
        self.passes += 1
        features = self.body(inputs)
        return features, self.head(features)


def context_of(model: nn.Module):
    """Return a context whose received model is ``model`` as it is now."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return LocalContext(model, state, state, {}, {}, None, F.cross_entropy, round=1, batch_size=4)


def step_of(context, inputs, labels=None):
    features, logits = context.model(inputs)
    return Step(dict(context.model.named_parameters()), inputs, labels, features, logits, context)


def test_the_term_by_hand():
    """beta 16, sigma 4, features 3 and 0 against received 0 and 0: gamma (e^2 + 1) / 2."""
    context = context_of(Features())
    inputs = torch.zeros(2, 3)
    context._received = (inputs, torch.zeros(2, 1))
    step = SimpleNamespace(features=torch.tensor([[3.0], [0.0]]), inputs=inputs, context=context)
    penalty = ManifoldRegularizer(gamma=0.1, sigma=4.0, beta=16.0).penalty(step)
    assert penalty.item() == pytest.approx(0.1 * (math.exp(2) + 1) / 2)
    assert context.measurements() == {"lorentz-distance": pytest.approx(4.0)}
    euclidean = ManifoldRegularizer(gamma=0.1, sigma=4.0, space="euclidean").penalty(step)
    assert euclidean.item() == pytest.approx(0.1 * (math.exp(9 / 4) + 1) / 2)


class SameBatch(TensorBatches):
    """Gives the very tensor, for which a context remembers the received features."""

    def batches(self, batch_size, *, generator, train, drop_last=False):
        """Yield one pass."""
        yield self.inputs, self.labels


def test_what_a_solver_finds_beside_its_place_is_not_measured():
    """SAM's second pass is at y + e. The mean is of both steps' first passes alone."""
    context = context_of(Features())
    inputs, labels = torch.eye(4, 3), torch.tensor([0, 1, 0, 1])
    seen = []

    class Watching(ManifoldRegularizer):
        def penalty(self, step):
            distance = lorentz_distance(step.features, step.context.received_features(inputs))
            seen.append(float(distance.detach().mean()))
            return super().penalty(step)

    options = LocalTrainingConfig(batch_size=4, epochs=2)
    context.data = SameBatch(inputs, labels)
    train_locally(context, [Watching(gamma=0.1)], SAM(rho=0.5), options, 0.1, torch.Generator())
    assert len(seen) == 4
    assert seen[1] > 0.0  # where e is
    measured = context.measurements()["lorentz-distance"]
    assert measured == pytest.approx((seen[0] + seen[2]) / 2, abs=1e-9)


def test_data_is_lifted_with_its_representation():
    """That is the distance of (x, z) and (x, z')."""
    context = context_of(Features().double())
    inputs = torch.randn(4, 3, generator=torch.manual_seed(3), dtype=torch.float64)
    received = context.received_features(inputs)
    with torch.no_grad():
        context.model.body.weight.add_(0.3)
    features = context.model(inputs)[0].detach()
    side = ManifoldRegularizer(gamma=1.0, sigma=2.0, beta=0.7, lifts="data")
    whole = [torch.cat([inputs, rows], dim=1) for rows in (features, received)]
    expected = torch.exp(by_definition(*whole, 0.7) / 2).mean()
    torch.testing.assert_close(
        side.penalty(step_of(context, inputs)).double(), expected, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("scale", [1e3, 1e8])
def test_large_features_give_a_finite_gradient(scale):
    context = context_of(Features(scale))
    with torch.no_grad():
        context.model.body.weight.mul_(-1.0)  # the other side of the hyperboloid
    penalty = ManifoldRegularizer().penalty(step_of(context, torch.ones(4, 3)))
    penalty.backward()
    assert torch.isfinite(penalty)
    assert torch.isfinite(context.model.body.weight.grad).all()
    assert context.model.body.weight.grad.abs().max() > 0


# ---- the method ----------------------------------------------------------------------------------


def test_the_first_step_pays_gamma():
    """Local and global model are one then: distance 0, R = 1; its share is gamma / objective."""
    strategy = FedMRUR(0.5, alpha=1.0, **PLAIN_MEAN)
    _, reports = federate(
        strategy,
        blobs(1),
        model=WithoutDropout,
        loss=F.cross_entropy,
        rounds=1,
        options=LocalTrainingConfig(batch_size=100, epochs=None, steps=1),
    )
    figures = reports[-1].metrics
    assert figures["lorentz-distance"] == 0.0
    assert figures["penalty"] == 0.5
    assert figures["penalty-share"] == pytest.approx(0.5 / figures["train-loss"])
    data = blobs(1)[0]
    task_loss = F.cross_entropy(WithoutDropout()(data.inputs)[1], data.labels).item()
    assert figures["train-loss"] == pytest.approx(0.5 + task_loss)
