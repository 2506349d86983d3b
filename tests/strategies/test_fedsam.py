"""SAM's steps on functions whose gradients are known."""

import itertools

import pytest
import torch

from tests.strategies.sides import sam
from tests.strategies.test_per_fedavg import ONES, drive, quadratics


def test_a_step_by_hand():
    """f = (w_1^2 + 4 w_2^2) / 2 at (3, 1): grad (3, 4), so with rho 5 the top is (6, 5)."""
    batch = (torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.zeros(2))
    start = torch.tensor([3.0, 1.0])
    end, loss, [(at, grad)] = drive(sam(rho=5.0), itertools.repeat(batch), start, lr=0.1)
    torch.testing.assert_close(grad, torch.tensor([6.0, 20.0]))
    assert torch.equal(at, start)  # corrected, and moved, from where it was
    torch.testing.assert_close(end, torch.tensor([2.4, -1.0]))
    assert loss.item() == pytest.approx(6.5)  # f(3, 1)


def test_an_adaptive_step_by_hand():
    """|w| g = (9, 4) there, of length sqrt(97): with rho sqrt(97), e = w^2 g = (27, 4)."""
    batch = (torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.zeros(2))
    start, optimizer = torch.tensor([3.0, 1.0]), sam(rho=97**0.5, adaptive=True)
    end, _, [(at, grad)] = drive(optimizer, itertools.repeat(batch), start, lr=0.1)
    torch.testing.assert_close(grad, torch.tensor([30.0, 20.0]))  # at (30, 5)
    assert torch.equal(at, start)
    torch.testing.assert_close(end, torch.tensor([0.0, -1.0]))


def test_an_adaptive_perturbation_does_not_depend_on_how_layers_are_scaled():
    """(a, b) and (7 a, b / 7) are one function a b: the losses at the top are the same."""
    tops = []
    for scale in (1.0, 7.0):
        params = {"a": torch.tensor([2.0 * scale]), "b": torch.tensor([3.0 / scale])}
        params = {name: value.requires_grad_() for name, value in params.items()}
        losses = []

        def backward(batch, params=params, losses=losses):
            for param in params.values():
                param.grad = None
            loss = (params["a"] * params["b"] - 1.0).square().sum()
            loss.backward()
            losses.append(loss.item())
            return loss.detach()

        optimizer = sam(rho=0.5, adaptive=True)
        optimizer.start(params, lr=0.1)
        optimizer.step(lambda: None, backward, lambda: None)
        tops.append(losses[1])
    assert tops[1] == pytest.approx(tops[0], rel=1e-5)


def test_the_norm_is_over_all_tensors_and_what_has_no_gradient_stays():
    """Of two scalars with gradients 3 and 4: e = rho (.6, .8); by tensor it would be rho (1, 1)."""
    params = {
        n: torch.tensor([v]).requires_grad_() for n, v in (("a", 3.0), ("b", 4.0), ("c", 2.0))
    }
    seen = []

    def backward(batch):
        seen.append([param.item() for param in params.values()])
        for param in params.values():
            param.grad = None
        loss = 0.5 * (params["a"].square().sum() + params["b"].square().sum())
        loss.backward()
        return loss.detach()

    optimizer = sam(rho=1.0)
    optimizer.start(params, lr=0.1)
    optimizer.step(lambda: None, backward, lambda: None)
    assert seen[0] == [3.0, 4.0, 2.0]
    assert seen[1] == pytest.approx([3.6, 4.8, 2.0])
    ends = [param.item() for param in params.values()]
    assert ends == pytest.approx([3.0 - 0.36, 4.0 - 0.48, 2.0])


def test_both_passes_see_one_batch():
    """Batches differ; a step uses up one."""
    batches = quadratics(3)
    source, expected = iter(batches), ONES
    end, _, _ = drive(sam(rho=0.5), source, ONES, lr=0.1, steps=2)
    for curvature, minimum in batches[:2]:
        first = curvature @ (expected - minimum)
        top = expected + 0.5 * first / first.norm()
        expected = expected - 0.1 * curvature @ (top - minimum)
    torch.testing.assert_close(end, expected, rtol=1e-6, atol=1e-8)
    assert next(source) is batches[2]


def test_weight_decay_does_not_perturb_and_a_zero_gradient_leaves_the_model():
    [batch] = quadratics(1)
    plain, decayed = (
        drive(sam(rho=0.5, weight_decay=decay), itertools.repeat(batch), ONES, lr=0.1)[0]
        for decay in (0.0, 0.2)
    )
    torch.testing.assert_close(decayed, plain - 0.1 * 0.2 * ONES)
    flat = (torch.zeros_like(batch[0]), batch[1])
    assert torch.equal(drive(sam(rho=0.5), itertools.repeat(flat), ONES, lr=0.1)[0], ONES)
