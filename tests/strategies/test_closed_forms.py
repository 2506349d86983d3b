"""Two least-squares clients whose common optimum is known in closed form."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from flwr.app import RecordDict
from torch import nn

from client_app.state import ContextStateStore
from client_app.training import train_locally
from common.errors import ConfigError
from strategies.base import LocalContext
from strategies.components.local_optimizers import SGD, Adam, reach
from strategies.components.local_training_config import LocalTrainingConfig, Phase
from strategies.components.samplers import FixedSizeSampler
from strategies.components.schedules import ExponentialDecay, MultiStep
from strategies.components.tensor_selection import TensorSelector
from strategies.fedavg import FedAvg
from strategies.fedprox import FedProx
from strategies.scaffold import SCAFFOLD, ControlVariateClient
from tests.federation import Regression, TensorBatches, federate, half_squared_error
from tests.strategies.sides import check_side

STEPS = LocalTrainingConfig(batch_size=100, epochs=5)


def clients() -> list[TensorBatches]:
    """Two clients with the same number of examples and different curvatures and optima."""
    generator = torch.Generator().manual_seed(3)
    datasets = []
    for scale, target in ((1.0, [2.0, -1.0]), (3.0, [-1.0, 4.0])):
        inputs = scale * torch.randn(20, 2, generator=generator, dtype=torch.float64)
        noise = torch.randn(20, generator=generator, dtype=torch.float64)
        datasets.append(
            TensorBatches(inputs, inputs @ torch.tensor(target, dtype=torch.float64) + noise)
        )
    return datasets


def optimum(datasets: list[TensorBatches]) -> torch.Tensor:
    """Return argmin of the mean of the clients' objectives, by the normal equations."""
    gram = sum(d.inputs.T @ d.inputs / len(d) for d in datasets)
    moment = sum(d.inputs.T @ d.labels / len(d) for d in datasets)
    return torch.linalg.solve(gram, moment)


def distance(strategy, rounds: int, **how) -> float:
    """Return the distance of a strategy's final params to the optimum."""
    datasets = clients()
    params, _ = federate(
        strategy, datasets, model=lambda: Regression(2), rounds=rounds, options=STEPS, **how
    )
    return float((params["head.weight"][0] - optimum(datasets)).norm())


def test_fedavg_stalls_where_scaffold_reaches_the_optimum():
    """Drift keeps FedAvg off the optimum; control variates cancel it."""
    assert distance(FedAvg(local_lr=0.05), 50) > 0.1
    assert distance(SCAFFOLD(local_lr=0.05), 50) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("option", "rounds"), [("I", 400), ("II", 100)])
def test_scaffold_under_partial_participation(option, rounds):
    """One of two clients a round: c moves by 1/N, and a client's c_i waits for its next turn."""
    strategy = SCAFFOLD(option, local_lr=0.04, sampler=FixedSizeSampler(0.5, seed=1))
    assert distance(strategy, rounds) < 1e-9


@pytest.mark.parametrize("schedule", [ExponentialDecay(0.99), MultiStep((0.3, 0.6), 0.5)])
def test_scaffold_under_a_schedule(schedule):
    """lr_sum is the round's own: a decayed rate leaves c_i a gradient."""
    assert distance(SCAFFOLD(local_lr=0.05, schedule=schedule), 60) < 1e-6


def test_scaffold_control_variates_are_the_clients_gradients():
    """At the optimum c_i is the gradient of client i's objective there, and c their mean, zero."""
    datasets = clients()
    stores = {i: ContextStateStore(RecordDict()) for i in range(2)}
    strategy = SCAFFOLD(local_lr=0.05)
    federate(
        strategy,
        datasets,
        model=lambda: Regression(2),
        rounds=60,
        options=STEPS,
        stores=stores,
    )
    best = optimum(datasets)
    for i, data in enumerate(datasets):
        residual = data.inputs @ best - data.labels
        gradient = data.inputs.T @ residual / len(data)
        kept = stores[i].load(strategy.state.experiment, 60)["control_variate"]["head.weight"][0]
        torch.testing.assert_close(kept, gradient, atol=1e-8, rtol=0)
    c = strategy.server_sides["scaffold"].control_variate["head.weight"]
    torch.testing.assert_close(c, torch.zeros_like(c), atol=1e-8, rtol=0)


def test_scaffold_by_hand():
    """One scalar weight, f_i = (a_i w - b_i)^2 / 2, eta_l = .1, K = 1, two rounds.

    a = (1, 2), b = (1, 4), x = 0. Round 1: g = (-1, -8), y = (.1, .8), x = .45,
    c_i = (x - y_i) / .1 = (-1, -8), c = -4.5.
    Round 2: g = (.45 - 1, .9 * 2 - 8) = (-.55, -6.2); with c - c_i = (-3.5, 3.5):
    y = (.45 + .405, .45 + .27) = (.855, .72), x = .7875.
    """
    datasets = [
        TensorBatches(
            torch.tensor([[a]], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
        )
        for a, b in ((1.0, 1.0), (2.0, 4.0))
    ]
    params, _ = federate(SCAFFOLD(local_lr=0.1), datasets, model=lambda: Regression(1), rounds=2)
    assert float(params["head.weight"]) == pytest.approx(0.7875, abs=1e-12)


class Shifted(Regression):
    """A second tensor, which other phases train."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        """Return (features, predictions)."""
        features, found = super().forward(inputs)
        return features, found + self.shift


def control_variate_after(
    options=STEPS, moved=0.0, optimizer=None, option="II"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return c_i+ of one round of steps so small that it is c_i's gradient, and that gradient.

    Args:
        options: how long.
        moved: how far from x training starts.
        optimizer: SGD where None.
        option: of SCAFFOLD.
    """
    data, _ = clients()
    model = Shifted(2)
    context = LocalContext(
        model=model,
        received_state=dict(model.state_dict()),
        anchor={name: value.clone() for name, value in model.state_dict().items()},
        received={"control_variate": {"head.weight": torch.tensor([[5.0, -7.0]]).double()}},
        state={},
        data=data,
        loss=half_squared_error,
        round=1,
        batch_size=100,
    )
    side = ControlVariateClient("all", option)
    side.begin(context)
    with torch.no_grad():
        model.head.weight += moved
    context.start_here()
    gradient = data.inputs.T @ (data.inputs @ model.head.weight[0] - data.labels) / len(data)
    generator = torch.Generator().manual_seed(0)
    summary, _ = train_locally(context, [side], optimizer or SGD(), options, 1e-9, generator)
    side.end(context, summary)
    return context.state["control_variate"]["head.weight"][0], gradient.detach()


def test_a_control_variate_counts_the_steps_from_where_they_start():
    """FedALA starts elsewhere than at x: the way there is no sum of gradients."""
    for moved in (0.0, 3.0):
        found, gradient = control_variate_after(moved=moved)
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)


@pytest.mark.parametrize("epochs", [1, 4])
def test_a_control_variate_counts_the_steps_that_its_tensor_takes(epochs):
    """Of 5 epochs the tensor is trained in some only, as in FedRep's phases."""
    phases = (Phase(TensorSelector("head.*"), epochs), Phase(TensorSelector("shift"), 5 - epochs))
    found, gradient = control_variate_after(
        LocalTrainingConfig(batch_size=100, epochs=5, phases=phases)
    )
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)


def test_how_far_gradients_reach_by_hand():
    """m = .5, three steps: 1 + .5 + .25, 1 + .5 and 1; m = 1: 3 + 2 + 1."""
    assert reach(3, 0.5) == pytest.approx(4.25)
    assert reach(3, 0.0) == 3
    assert reach(3, 1.0) == 6


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_control_variate_under_momentum_is_the_gradient(momentum):
    found, gradient = control_variate_after(optimizer=SGD(momentum), option="II-momentum")
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_under_momentum():
    """FedAvg stalls as without."""
    heavy = partial(SGD, 0.9)
    assert distance(FedAvg(local_lr=0.01), 100, optimizer=heavy) > 0.05
    assert distance(SCAFFOLD("II-momentum", local_lr=0.01), 400, optimizer=heavy) < 1e-9


def test_a_tensor_that_is_never_trained_keeps_its_control_variate():
    never = LocalTrainingConfig(
        batch_size=100, epochs=5, phases=(Phase(TensorSelector("shift"), 5),)
    )
    found, _ = control_variate_after(never)
    assert torch.equal(found, torch.zeros_like(found))


def test_fedprox_fixed_point_of_one_client():
    """Minimising CE + mu/2 ||y - x||^2 exactly: (H + mu I) y = H w* + mu x, in one round."""
    (data, _) = clients()
    mu, hessian = 2.0, data.inputs.T @ data.inputs / len(data)
    best = torch.linalg.solve(hessian, data.inputs.T @ data.labels / len(data))
    expected = torch.linalg.solve(hessian + mu * torch.eye(2), hessian @ best)
    params, _ = federate(
        FedProx(mu, local_lr=0.2),
        [data],
        model=lambda: Regression(2),
        rounds=1,
        options=LocalTrainingConfig(batch_size=100, epochs=300),
    )
    torch.testing.assert_close(params["head.weight"][0], expected, atol=1e-9, rtol=0)


def test_momentum_with_option_two_is_refused():
    """Option II reads the gradient off plain SGD steps; option I does not."""
    with pytest.raises(ConfigError, match=r"local\.momentum=0"):
        check_side(ControlVariateClient("all", "II"), Regression(1), SGD(momentum=0.9))
    with pytest.raises(ConfigError, match=r"local\.optimizer=sgd"):
        check_side(ControlVariateClient("all", "II"), Regression(1), Adam())
    with pytest.raises(ConfigError, match=r"option II-momentum .*local\.optimizer=sgd"):
        check_side(ControlVariateClient("all", "II-momentum"), Regression(1), Adam())
    check_side(ControlVariateClient("all", "II-momentum"), Regression(1), SGD(momentum=0.9))
    check_side(ControlVariateClient("all", "I"), Regression(1), SGD(momentum=0.9))
    check_side(ControlVariateClient("none", "II"), Regression(1), SGD(momentum=0.9))
