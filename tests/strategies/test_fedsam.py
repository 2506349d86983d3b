"""SAM's steps on functions whose gradients are known."""

from __future__ import annotations

import itertools

import pytest
import torch

from strategies.components.local_optimizers import SGD
from strategies.fedsam import SAM
from tests.strategies.test_per_fedavg import drive, quadratic, quadratics


def test_a_step_by_hand():
    """f = (w_1^2 + 4 w_2^2) / 2 at (3, 1): grad (3, 4), so with rho 5 the top is (6, 5)."""
    batch = (torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.zeros(2))
    end, loss, [(at, grad)] = drive(
        SAM(rho=5.0), itertools.repeat(batch), torch.tensor([3.0, 1.0]), lr=0.1
    )
    torch.testing.assert_close(grad, torch.tensor([6.0, 20.0]))
    assert torch.equal(at, torch.tensor([3.0, 1.0]))  # corrected, and moved, from where it was
    torch.testing.assert_close(end, torch.tensor([2.4, -1.0]))
    assert loss.item() == pytest.approx(6.5)  # f(3, 1)


def test_the_norm_is_over_all_tensors():
    """Of two scalars with gradients 3 and 4: e = rho (.6, .8); by tensor it would be rho (1, 1)."""
    params = {n: torch.tensor([v]).requires_grad_() for n, v in (("a", 3.0), ("b", 4.0))}
    seen = []

    def backward(batch):
        seen.append([param.detach().item() for param in params.values()])
        for param in params.values():
            param.grad = None
        loss = 0.5 * sum(param.square().sum() for param in params.values())
        loss.backward()
        return loss.detach()

    optimizer = SAM(rho=1.0)
    optimizer.start(params, lr=0.1)
    optimizer.step(lambda: None, backward, lambda: None)
    assert seen[0] == [3.0, 4.0]
    assert seen[1] == pytest.approx([3.6, 4.8])


def test_both_passes_see_one_batch():
    """Batches differ; a step uses up one."""
    batches = quadratics(3)
    source = iter(batches)
    start = torch.ones(3, dtype=torch.float64)
    end, _, _ = drive(SAM(rho=0.5), source, start, lr=0.1, steps=2)
    expected = start
    for curvature, minimum in batches[:2]:
        first = curvature @ (expected - minimum)
        top = expected + 0.5 * first / first.norm()
        expected = expected - 0.1 * curvature @ (top - minimum)
    torch.testing.assert_close(end, expected, rtol=1e-6, atol=1e-8)
    assert next(source) is batches[2]


def test_the_perturbation_does_not_see_weight_decay():
    batch = quadratics(1)[0]
    start = torch.ones(3, dtype=torch.float64)
    ends = [
        drive(SAM(rho=0.5, weight_decay=decay), itertools.repeat(batch), start, lr=0.1)[0]
        for decay in (0.0, 0.2)
    ]
    torch.testing.assert_close(ends[1], ends[0] - 0.1 * 0.2 * start)


def test_what_has_no_gradient_stays():
    params = {
        "used": torch.tensor([1.0]).requires_grad_(),
        "unused": torch.tensor([2.0]).requires_grad_(),
    }

    def backward(batch):
        params["used"].grad = None
        loss = params["used"].square().sum()
        loss.backward()
        return loss.detach()

    optimizer = SAM(rho=0.5)
    optimizer.start(params, lr=0.1)
    optimizer.step(lambda: None, backward, lambda: None)
    assert params["used"].item() == pytest.approx(1.0 - 0.1 * 2 * 1.5)
    assert params["unused"].item() == 2.0


def test_a_zero_gradient_leaves_the_model():
    batch = (torch.eye(2), torch.ones(2))
    end, _, _ = drive(SAM(rho=0.5), itertools.repeat(batch), torch.ones(2), lr=0.1)
    assert torch.equal(end, torch.ones(2))


def test_a_flat_minimum_is_preferred():
    """Between a sharp and a flat minimum, SAM's steps leave the sharp one, SGD's do not.

    On (w - 1)^2 * 50 a step with rho .5 goes 5 * .. away: |w - 1| settles near rho, never at 0.
    """
    sharp = (torch.tensor([[100.0]], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    start = torch.tensor([1.1], dtype=torch.float64)
    sam, _, _ = drive(SAM(rho=0.5), itertools.repeat(sharp), start, lr=0.005, steps=50)
    sgd, _, _ = drive(SGD(), itertools.repeat(sharp), start, lr=0.005, steps=50)
    assert (sgd - 1).abs().item() < 1e-9
    assert (sam - 1).abs().item() > 0.1


def test_rho_zero_is_sgd_with_one_pass():
    passes = []

    def counted(param, batch):
        passes.append(1)
        return quadratic(param, batch)

    batch, start = quadratics(1)[0], torch.ones(3, dtype=torch.float64)
    ends = [
        drive(optimizer, itertools.repeat(batch), start, lr=0.1, steps=3, loss_of=counted)[0]
        for optimizer in (SAM(rho=0.0, momentum=0.5), SGD(momentum=0.5))
    ]
    assert torch.equal(*ends)
    assert len(passes) == 6
