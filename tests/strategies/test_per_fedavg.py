"""Per-FedAvg's optimizer on quadratics, where its steps are known."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from tests.federation import client_of
from tests.strategies.labelled import Classifier, blobs
from tests.strategies.sides import per_fedavg

Quadratic = tuple[Tensor, Tensor]  # curvature H (d, d) and minimum m (d,): (w - m)^T H (w - m) / 2
ZERO, ONES = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)


def quadratic(w: Tensor, batch: Quadratic) -> Tensor:
    curvature, minimum = batch
    return 0.5 * (w - minimum) @ curvature @ (w - minimum)


def drive(optimizer, batches, start: Tensor, lr: float, *, steps=1, loss_of=quadratic):
    """Take steps; return the params, the last loss, and (params, gradient) at every correction."""
    param, batches = start.clone().requires_grad_(), iter(batches)
    corrected = []
    optimizer.start({"w": param}, lr)

    def backward(batch: Quadratic) -> Tensor:
        param.grad = None
        loss = loss_of(param, batch)
        loss.backward()
        return loss.detach()

    def correct() -> None:
        corrected.append((param.detach().clone(), param.grad.clone()))

    for _ in range(steps):
        loss = optimizer.step(lambda: next(batches), backward, correct)
    return param.detach(), loss, corrected


def quadratics(count: int) -> list[Quadratic]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for _ in range(count):
        root = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        minimum = torch.randn(3, generator=generator, dtype=torch.float64)
        found.append((root @ root.T + torch.eye(3), minimum))
    return found


def test_a_first_order_step_by_hand():
    """w = 0: g = 2 (0 - 1) = -2, w' = .2, g' = 4 (.2 - 3) = -11.2, w = .5 * 11.2; f(w') = 15.68."""
    batches = [
        (torch.tensor([[curvature]]).double(), torch.tensor([minimum]).double())
        for curvature, minimum in ((2.0, 1.0), (4.0, 3.0))
    ]
    w, loss, corrected = drive(per_fedavg(0.1), batches, torch.zeros(1).double(), 0.5)
    torch.testing.assert_close(w, torch.tensor([5.6]).double())
    torch.testing.assert_close(loss, torch.tensor(15.68).double())
    ((where, grad),) = corrected  # once, at the restored w, on the gradient that is used
    assert where.item() == 0.0
    assert grad.item() == pytest.approx(-11.2)


@pytest.mark.parametrize("delta", [1e-3, 0.5])
def test_a_hessian_free_step_against_the_exact_hessian(delta):
    """g = (I - alpha H'') H' (w' - m'): exact on a quadratic, whatever delta."""
    batches = quadratics(3)
    optimizer = per_fedavg(0.1, "hessian_free", delta)
    w, loss, ((where, grad),) = drive(optimizer, batches, ONES, 0.5)
    (h, m), (h_, m_), (h__, _) = batches
    adapted = ONES - 0.1 * h @ (ONES - m)
    exact = (torch.eye(3, dtype=torch.float64) - 0.1 * h__) @ h_ @ (adapted - m_)
    torch.testing.assert_close(grad, exact, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(w, 1.0 - 0.5 * exact, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(loss, quadratic(adapted, batches[1]))
    assert torch.equal(where, ONES)


@pytest.mark.parametrize(("order", "count"), [("first", 2), ("hessian_free", 3)])
def test_alpha_zero_is_sgd_on_the_second_batch_and_same_batch_repeats_one(order, count):
    batches = quadratics(2 * count)
    ours, _, _ = drive(per_fedavg(0.0, order), batches, ZERO, 0.05, steps=2)
    theirs, _, _ = drive(SGD(), batches[1::count], ZERO, 0.05, steps=2)
    assert torch.equal(ours, theirs)
    optimizer = per_fedavg(0.1, order, same_batch=True)
    ours, _, _ = drive(optimizer, batches, ZERO, 0.05, steps=2)
    repeated = [batch for batch in batches[:2] for _ in range(count)]
    theirs, _, _ = drive(per_fedavg(0.1, order), repeated, ZERO, 0.05, steps=2)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("order", "batches"), [("first", 1), ("hessian_free", 2)])
def test_when_the_batches_run_out_the_model_is_as_before_the_step(order, batches):
    param = ONES.clone().requires_grad_()
    optimizer = per_fedavg(0.1, order)
    optimizer.start({"w": param}, 0.5)
    stream = iter(quadratics(batches))

    def no_pass(batch=None):
        pytest.fail("it began the step")

    with pytest.raises(StopIteration):
        optimizer.step(lambda: next(stream), no_pass, no_pass)
    assert torch.equal(param, ONES)
    assert param.grad is None


def test_both_hessian_free_passes_have_the_same_dropout():
    """Else their difference over 2 delta is noise. The other passes draw anew, as two steps do."""
    states = []

    def loss_of(w, batch):
        states.append(torch.get_rng_state())
        return quadratic(F.dropout(w, 0.5), batch)

    with torch.random.fork_rng():
        optimizer = per_fedavg(0.1, "hessian_free")
        drive(optimizer, quadratics(3), ONES, 0.5, loss_of=loss_of)
        states.append(torch.get_rng_state())
    assert torch.equal(states[2], states[3])
    others = [states[i] for i in (0, 1, 3, 4)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(others))


def fit(model, options: LocalTrainingConfig, **how) -> dict:
    client = client_of(model, blobs(1)[0], F.cross_entropy, options=options, **how)
    return client.fit(client.get_parameters({}), {"round": 1, "lr": 0.1})[2]


@pytest.mark.parametrize(
    ("how", "steps"), [({}, 3), ({"order": "hessian_free"}, 2), ({"same_batch": True}, 6)]
)
def test_steps_are_counted_as_moves(how, steps):
    """17 examples in batches of 8, two epochs: six mini-batches."""
    options = LocalTrainingConfig(batch_size=8, epochs=2)
    metrics = fit(Classifier(), options, optimizer=per_fedavg(**how))
    assert (metrics["num-steps"], metrics["lr-sum"]) == (steps, pytest.approx(0.1 * steps))
