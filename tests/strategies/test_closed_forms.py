"""Least-squares clients whose common optimum is known: SCAFFOLD, FedProx, FedNova, FedDyn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from client_app.state import ContextStateStore
from client_app.training import train_locally
from common.errors import ConfigError
from strategies.base import LocalContext, LocalSummary, Reply
from strategies.components.local_optimizers import SGD, Adam
from strategies.components.local_training_config import LocalTrainingConfig, Phase
from strategies.components.samplers import FixedSizeSampler
from strategies.components.schedules import ExponentialDecay
from strategies.components.tensor_selection import TensorSelector
from strategies.fedavg import FedAvg
from strategies.feddyn import FedDyn
from strategies.fednova import REACH, FedNova, FedNovaClient, NormalizedMean
from strategies.fedprox import FedProx
from strategies.scaffold import SCAFFOLD, ControlVariateClient
from tests.federation import Regression, TensorBatches, federate, half_squared_error
from tests.strategies.sides import check_side

STEPS = LocalTrainingConfig(batch_size=100, epochs=5)


class Listed:
    """A sampler: the given cohorts, from round 1 on, then everybody."""

    def __init__(self, *cohorts: list[int]) -> None:
        self.cohorts = dict(enumerate(cohorts, start=1))

    def sample(self, round: int, num_clients: int) -> list[int]:
        return self.cohorts.get(round, list(range(num_clients)))


def scalars(sizes: tuple[int, int] = (1, 1)) -> list[TensorBatches]:
    """Return f_i = (a_i w - b_i)^2 / 2 with a = (1, 2), b = (1, 4)."""
    return [
        TensorBatches(torch.full((n, 1), a).double(), torch.full((n,), b).double())
        for n, a, b in zip(sizes, (1.0, 2.0), (1.0, 4.0), strict=True)
    ]


def clients() -> list[TensorBatches]:
    """Two clients with the same number of examples and different curvatures and optima."""
    generator = torch.Generator().manual_seed(3)
    datasets = []
    for scale, target in ((1.0, [2.0, -1.0]), (3.0, [-1.0, 4.0])):
        inputs = scale * torch.randn(20, 2, generator=generator, dtype=torch.float64)
        noise = torch.randn(20, generator=generator, dtype=torch.float64)
        labels = inputs @ torch.tensor(target, dtype=torch.float64) + noise
        datasets.append(TensorBatches(inputs, labels))
    return datasets


def stores(count: int = 2) -> dict[int, ContextStateStore]:
    return {i: ContextStateStore(RecordDict()) for i in range(count)}


def optimum(datasets: list[TensorBatches]) -> Tensor:
    """Return argmin of the mean of the clients' objectives, by the normal equations."""
    gram = sum(d.inputs.T @ d.inputs / len(d) for d in datasets)
    moment = sum(d.inputs.T @ d.labels / len(d) for d in datasets)
    return torch.linalg.solve(gram, moment)


def gradient(data: TensorBatches, weight: Tensor) -> Tensor:
    return data.inputs.T @ (data.inputs @ weight - data.labels) / len(data)


def distance(strategy, rounds: int, **how) -> float:
    """Return the distance of a strategy's final params to the optimum."""
    datasets = clients()
    params, _ = federate(
        strategy, datasets, model=lambda: Regression(2), rounds=rounds, options=STEPS, **how
    )
    return float((params["head.weight"][0] - optimum(datasets)).norm())


def trained(
    strategy, sizes, rounds=1, batch_size=1, optimizer=SGD, initial=None, **options
) -> float:
    """Return the w that a strategy's clients with ``scalars(sizes)`` reach."""
    params, _ = federate(
        strategy,
        scalars(sizes),
        model=lambda: Regression(1),
        rounds=rounds,
        optimizer=optimizer,
        options=LocalTrainingConfig(batch_size=batch_size, **options),
        initial=initial,
    )
    return float(params["head.weight"])


HEAVY = partial(SGD, 0.9)
HALF = FixedSizeSampler(0.5, seed=1)
DECAY = ExponentialDecay(0.99)
REACHED = {
    "scaffold": (lambda: SCAFFOLD(local_lr=0.05), 50, 1e-10),
    # one of two clients a round: c moves by 1/N, a client's c_i waits for its next turn
    "scaffold I, half": (lambda: SCAFFOLD("I", local_lr=0.04, sampler=HALF), 400, 1e-9),
    "scaffold II, half": (lambda: SCAFFOLD("II", local_lr=0.04, sampler=HALF), 100, 1e-9),
    # lr_sum is the round's own: a decayed rate leaves c_i a gradient
    "scaffold decay": (lambda: SCAFFOLD(local_lr=0.05, schedule=DECAY), 60, 1e-6),
    "scaffold momentum": (lambda: SCAFFOLD("II-momentum", local_lr=0.02), 200, 1e-9),
    "feddyn": (lambda: FedDyn(1.5, local_lr=0.1), 50, 1e-10),
    "feddyn half": (lambda: FedDyn(1.5, local_lr=0.1, sampler=HALF), 110, 1e-10),
    # h_i is a sum of displacements that no learning rate divides
    "feddyn decay": (lambda: FedDyn(1.5, local_lr=0.1, schedule=DECAY), 50, 1e-8),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REACHED)
def test_it_reaches_the_optimum(case):
    strategy, rounds, within = REACHED[case]
    optimizer = HEAVY if case == "scaffold momentum" else SGD
    assert distance(strategy(), rounds, optimizer=optimizer) < within


@pytest.mark.slow
def test_fedavg_stalls_short_of_the_optimum():
    """Drift keeps FedAvg off it, with momentum and with half the clients, too."""
    assert distance(FedAvg(local_lr=0.05), 50) > 0.1
    assert distance(FedAvg(local_lr=0.1, sampler=HALF), 40) > 0.1
    assert distance(FedAvg(local_lr=0.01), 100, optimizer=HEAVY) > 0.05


# ---- SCAFFOLD ------------------------------------------------------------------------------------


def test_scaffold_follows_its_equations():
    """Equations 3 to 5 with option II, full batches, K = 2, x = .5.

    No fixed point shows a wrong K, rate, or |S| for N in c: they only damp or shift c.
    """
    cohorts = [0], [1], [0], [0, 1], [1]
    x, c, local = 0.5, 0.0, [0.0, 0.0]
    for t, cohort in enumerate(cohorts):
        lr = 0.1 * 0.5**t
        updates, deltas = [], []
        for i in cohort:
            y, (a, b) = x, ((1.0, 1.0), (2.0, 4.0))[i]
            for _ in range(2):
                y -= lr * (a * (a * y - b) - local[i] + c)
            new = local[i] - c + (x - y) / (2 * lr)
            updates.append(y - x)
            deltas.append(new - local[i])
            local[i] = new
        x += sum(updates) / len(cohort)
        c += sum(deltas) / 2
    strategy = SCAFFOLD(local_lr=0.1, schedule=ExponentialDecay(0.5), sampler=Listed(*cohorts))
    start = {"head.weight": torch.tensor([[0.5]], dtype=torch.float64)}
    found = trained(strategy, (3, 3), 5, 100, epochs=2, initial=start)
    assert found == pytest.approx(x, abs=1e-12)


class Shifted(Regression):
    """A second tensor, which other phases train."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        """Return (features, predictions)."""
        features, found = super().forward(inputs)
        return features, found + self.shift


@pytest.mark.parametrize(
    ("phases", "moved", "momentum", "option"),
    [
        ({}, 3.0, 0.0, "II"),  # FedALA starts elsewhere than at x
        ({"head.*": 4, "shift": 1}, 0.0, 0.0, "II"),  # as in FedRep's phases
        ({}, 0.0, 0.5, "II-momentum"),
        ({"shift": 5}, 0.0, 0.0, "II"),
    ],
)
def test_a_control_variate_is_the_gradient_along_the_steps_that_its_tensor_took(
    phases, moved, momentum, option
):
    """Steps so small that all have one gradient; a tensor that is never trained keeps its c_i."""
    parts = tuple(Phase(TensorSelector(layers), epochs) for layers, epochs in phases.items())
    options = LocalTrainingConfig(batch_size=100, epochs=5, phases=parts)
    data, _ = clients()
    model = Shifted(2)
    received = {"control_variate": {"head.weight": torch.tensor([[5.0, -7.0]]).double()}}
    context = LocalContext(model, {}, {}, received, {}, data, half_squared_error, 1, 100)
    side = ControlVariateClient("all", option)
    side.begin(context)
    with torch.no_grad():
        model.head.weight += moved
    context.start_here()
    expected = gradient(data, model.head.weight[0]).detach() * (phases != {"shift": 5})
    summary, _ = train_locally(context, [side], SGD(momentum), options, 1e-9, torch.Generator())
    side.end(context, summary)
    found = context.state["control_variate"]["head.weight"][0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_momentum_with_option_two_is_refused():
    """Option II reads the gradient off plain SGD steps; option I does not."""
    heavy = SGD(momentum=0.9)
    for option, optimizer in (("II", heavy), ("II", Adam()), ("II-momentum", Adam())):
        with pytest.raises(ConfigError, match=rf"fedpvr\.option={option} .*local\.optimizer=sgd"):
            check_side(ControlVariateClient("all", option, "fedpvr"), Regression(1), optimizer)
    for layers, option in (("all", "II-momentum"), ("all", "I"), ("none", "II")):
        check_side(ControlVariateClient(layers, option), Regression(1), heavy)


# ---- FedProx -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fedprox_fixed_point_of_one_client():
    """Minimising CE + mu/2 ||y - x||^2 exactly: (H + mu I) y = H w* + mu x, in one round."""
    (data, _) = clients()
    mu, hessian = 2.0, data.inputs.T @ data.inputs / len(data)
    best = torch.linalg.solve(hessian, data.inputs.T @ data.labels / len(data))
    expected = torch.linalg.solve(hessian + mu * torch.eye(2), hessian @ best)
    options = LocalTrainingConfig(batch_size=100, epochs=300)
    how = {"model": lambda: Regression(2), "rounds": 1, "options": options}
    params, _ = federate(FedProx(mu, local_lr=0.2), [data], **how)
    torch.testing.assert_close(params["head.weight"][0], expected, atol=1e-9, rtol=0)


# ---- FedNova -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fednova_reaches_the_optimum_where_fedavg_counts_steps_twice():
    """Client 1 has 3 examples of 4 and, in batches of one, 3 steps for client 0's one.

    FedNova: (w - 1) + 3 s 4 (w - 2) = 0, where s is the mean decay of client 1's gradient over its
    steps, 1 for small eta_l: the optimum of (f_0 + 3 f_1) / 4. FedAvg: 9 s in place of 3 s.
    """
    lr = 0.02
    s = (1 - (1 - 4 * lr) ** 3) / (12 * lr)
    nova, average = (trained(method(local_lr=lr), (1, 3), 150) for method in (FedNova, FedAvg))
    assert nova == pytest.approx((1 + 24 * s) / (1 + 12 * s), abs=1e-9)
    assert average == pytest.approx((1 + 72 * s) / (1 + 36 * s), abs=1e-9)
    assert abs(nova - 25 / 13) < 0.01 < 0.04 < abs(average - 25 / 13)


def test_fednova_with_equal_steps_is_fedavg():
    for optimizer in (SGD, HEAVY):
        how = {"batch_size": 10, "epochs": 4, "optimizer": optimizer, "rounds": 3}
        found, plain = (trained(s(local_lr=0.05), (1, 3), **how) for s in (FedNova, FedAvg))
        assert found == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize(
    ("momentum", "reaches"), [(0.0, (1.0, 3.0)), (0.5, (1.0, 4.25)), (1.0, (1.0, 6.0))]
)
def test_fednova_by_hand(momentum, reaches):
    """Steps so small that client i moves by -eta_l |a_i| g_i, g = (-1, -8): p = (1/4, 3/4)."""
    lr = 1e-7
    found = trained(FedNova(local_lr=lr), (1, 3), optimizer=partial(SGD, momentum)) / lr
    effective = 0.25 * reaches[0] + 0.75 * reaches[1]
    assert found == pytest.approx(effective * (0.25 * 1 + 0.75 * 8), rel=1e-5)


def test_fednova_counts_each_tensors_own_steps_and_leaves_untrained_ones():
    """Names in alphabetical order: a (1 and 3 steps), b (none and 2)."""

    def reply(client, reached, update):
        payloads = {REACH: {"reach": torch.tensor(reached, dtype=torch.float64)}}
        moved = {"b": torch.tensor([update[1]]), "a": torch.tensor([update[0]])}
        return Reply(client, 1, 1, 0.1, moved, payloads)

    replies = [reply(0, [1.0, 0.0], (4.0, 0.0)), reply(1, [3.0, 2.0], (6.0, 8.0))]
    delta = NormalizedMean()({name: torch.zeros(1) for name in "ba"}, replies)
    assert delta["a"].item() == pytest.approx(2.0 * (0.5 * 4 / 1 + 0.5 * 6 / 3))
    assert delta["b"].item() == pytest.approx(1.0 * 0.5 * 8 / 2)
    summary = LocalSummary(1, 3, 0.3, reaches={"a": 0.7})
    context = LocalContext(None, {}, dict.fromkeys("ba"), {}, {}, None, None, 1, 1)
    sent = FedNovaClient().end(context, summary)[REACH]["reach"]
    assert sent.tolist() == pytest.approx([0.7, 0.3])
    with pytest.raises(ConfigError, match=r"local\.optimizer=sgd"):
        check_side(FedNovaClient(), Regression(1), Adam())
