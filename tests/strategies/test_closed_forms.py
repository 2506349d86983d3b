"""SCAFFOLD, FedProx and FedNova on least squares, whose steps are known."""

from functools import partial

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedhet.client_app.state import ContextStateStore
from fedhet.strategies.base import LocalContext, LocalSummary, RefusedReplyError, Reply
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training import train_locally
from fedhet.strategies.components.local_training_config import LocalTrainingConfig, Phase
from fedhet.strategies.components.schedules import ExponentialDecay
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.fednova import REACH, FedNova, FedNovaClient, FedNovaServer, NormalizedMean
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.scaffold import CONTROL_VARIATE, SCAFFOLD
from tests.federation import Regression, TensorBatches, federate, half_squared_error
from tests.refused import refused
from tests.strategies.sides import built, client_side

STEPS = LocalTrainingConfig(batch_size=100, epochs=5)
HALF = {"head.weight": torch.tensor([[0.5]], dtype=torch.float64)}


class Listed:
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
    gram = sum(d.inputs.T @ d.inputs / len(d) for d in datasets)
    moment = sum(d.inputs.T @ d.labels / len(d) for d in datasets)
    return torch.linalg.solve(gram, moment)


def gradient(data: TensorBatches, weight: Tensor) -> Tensor:
    return data.inputs.T @ (data.inputs @ weight - data.labels) / len(data)


def distance(strategy, rounds: int, **how) -> float:
    datasets = clients()
    params, _ = federate(
        strategy, datasets, model=lambda: Regression(2), rounds=rounds, options=STEPS, **how
    )
    return float((params["head.weight"][0] - optimum(datasets)).norm())


def trained(
    strategy, sizes, rounds=1, batch_size=1, optimizer=SGD, initial=None, **options
) -> float:
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


# ---- SCAFFOLD ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "momentum"), [("I", 0.0), ("I", 0.5), ("II", 0.0), ("II-momentum", 0.5)]
)
def test_scaffold_follows_its_equations(option, momentum):
    """Equations 3 to 5, with K = 2 and x = .5."""
    cohorts = [0], [1], [0], [0, 1], [1]
    x, c, local = 0.5, 0.0, [0.0, 0.0]
    for t, cohort in enumerate(cohorts):
        lr = 0.1 * 0.5**t
        updates, deltas = [], []
        for i in cohort:
            y, velocity, (a, b) = x, 0.0, ((1.0, 1.0), (2.0, 4.0))[i]
            for _ in range(2):
                velocity = momentum * velocity + a * (a * y - b) - local[i] + c
                y -= lr * velocity
            new = local[i] - c + (x - y) / (lr * (2 + momentum))  # the second step has both
            if option == "I":
                new = a * (a * x - b)
            updates.append(y - x)
            deltas.append(new - local[i])
            local[i] = new
        x += sum(updates) / len(cohort)
        c += sum(deltas) / 2
    decay, sampler = ExponentialDecay(decay=0.5), Listed(*cohorts)
    strategy = built(SCAFFOLD, option=option, local_lr=0.1, schedule=decay, sampler=sampler)
    how = {"optimizer": partial(SGD, momentum=momentum), "epochs": 1, "initial": HALF}
    assert trained(strategy, (3, 3), 5, 2, **how) == pytest.approx(x, abs=1e-12)


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(2, affine=False, track_running_stats=False)

    def forward(self, inputs):
        return super().forward(self.norm(inputs))


def test_batchnorm_sees_no_single_example_for_scaffolds_gradient_at_x():
    """Nine examples in batches of four, and the last is left out of training alone."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    inputs, labels = rows[:, :2], rows[:, 2]
    strategy = built(SCAFFOLD, option="I", local_lr=0.1)
    federate(
        strategy,
        [TensorBatches(inputs, labels)],
        model=Normed,
        rounds=1,
        options=LocalTrainingConfig(batch_size=4, epochs=1, drop_last=True),
    )
    expected = torch.zeros(2, dtype=torch.float64)
    for part in (slice(0, 5), slice(5, 9)):
        x = inputs[part]
        scaled = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
        expected -= (scaled * labels[part, None]).sum(0) / 9  # at x = 0
    found = strategy.server_step.broadcast(0)[CONTROL_VARIATE]["head.weight"][0]
    torch.testing.assert_close(found, expected)


class Shifted(Regression):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        features, found = super().forward(inputs)
        return features, found + self.shift


@pytest.mark.parametrize(
    ("phases", "moved"),
    [
        ({}, 3.0),  # FedALA starts elsewhere than at x
        ({"shift": 1, "head.*": 4}, 0.0),  # as in FedRep's phases
        ({"shift": 5}, 0.0),
    ],
)
def test_a_control_variate_is_the_gradient_along_the_steps_that_its_tensor_took(phases, moved):
    """Steps so small that all have one gradient; a tensor that is never trained keeps its c_i."""
    parts = tuple(Phase(TensorSelector(layers), epochs) for layers, epochs in phases.items())
    options = LocalTrainingConfig(batch_size=100, epochs=5, phases=parts)
    data, _ = clients()
    model = Shifted(2)
    received = {"control_variate": {"head.weight": torch.tensor([[5.0, -7.0]]).double()}}
    own = {"control_variate": {"head.weight": torch.tensor([[1.0, -2.0]]).double()}}
    context = LocalContext(model, {}, {}, received, own, data, half_squared_error, 1, 100, 1e-9)
    side = client_side(SCAFFOLD)
    side.begin(context)
    with torch.no_grad():
        model.head.weight += moved
    context.start_here()
    expected = gradient(data, model.head.weight[0]).detach()
    if phases == {"shift": 5}:
        expected = own["control_variate"]["head.weight"][0]
    summary, _ = train_locally(context, [side], SGD(), options, torch.Generator())
    side.end(context, summary)
    found = context.state["control_variate"]["head.weight"][0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


# ---- FedProx -------------------------------------------------------------------------------------


def test_two_steps_of_fedprox_by_hand():
    """x = .5, mu = 2: y = (.55, 1.1), then g + mu (y - x) = (-.45 + .1, -3.6 + 1.2)."""
    found = trained(built(FedProx, mu=2.0, local_lr=0.1), (1, 1), epochs=2, initial=HALF)
    assert found == pytest.approx(((0.55 + 0.035) + (1.1 + 0.24)) / 2)


# ---- FedNova -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("momentum", "reaches"), [(0.0, (1.0, 3.0)), (0.5, (1.0, 4.25)), (1.0, (1.0, 6.0))]
)
def test_fednova_by_hand(momentum, reaches):
    """Steps so small that client i moves by -eta_l |a_i| g_i, g = (-1, -8): p = (1/4, 3/4)."""
    lr = 1e-7
    optimizer = partial(SGD, momentum=momentum)
    found = trained(built(FedNova, local_lr=lr), (1, 3), optimizer=optimizer) / lr
    effective = 0.25 * reaches[0] + 0.75 * reaches[1]
    assert found == pytest.approx(effective * (0.25 * 1 + 0.75 * 8), rel=1e-5)


@pytest.mark.parametrize("reach", [-1.0, 1e-12, 0.099, 0.61, 1e300])
def test_fednova_refuses_what_three_steps_of_a_tenth_cannot_reach(reach):
    """One of them reaches .1, and all with momentum 1 reach (1 + 2 + 3) / 10."""
    server = FedNovaServer()
    server.init({"w": torch.zeros(1)})

    def reply(value: float) -> Reply:
        sent = {REACH: {"reach": torch.tensor([value], dtype=torch.float64)}}
        return Reply(0, 5, 3, 0.3, {}, sent)

    for honest in (0.0, 0.1, 0.3, 0.6):
        server.check(reply(honest))
    with refused("0", "0.1", "0.6", kind=RefusedReplyError):
        server.check(reply(reach))


ONE = torch.ones(1, dtype=torch.float64)


def test_fednovas_shares_are_exact_in_double_precision():
    """A round of float32 shares is within 2^-22 of it: by so much fedhet 0.1.0 may differ."""
    sizes = [1, 3, 7, 1000003, 77777, 123]
    replies = [
        Reply(i, n, 2, 0.2, {"w": torch.ones(1, dtype=torch.float64)}, {REACH: {"reach": ONE}})
        for i, n in enumerate(sizes)
    ]
    found = NormalizedMean()({"w": torch.zeros(1)}, replies)["w"].item()
    assert found == pytest.approx(1.0, abs=4e-16)
    rounded = torch.tensor([float(n) for n in sizes])
    shares = (rounded / rounded.sum()).double()
    assert 0.0 < abs(float(shares.sum()) - 1.0) < 2.0**-22
    for share, size in zip(shares.tolist(), sizes, strict=True):
        assert share == pytest.approx(size / sum(sizes), rel=2.0**-22)


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
    context = LocalContext(nn.Module(), {}, (), {}, {}, None, None, 1, 1, 0.1)
    context.anchor = dict.fromkeys("ba")
    sent = FedNovaClient().end(context, summary)[REACH]["reach"]
    assert sent.tolist() == pytest.approx([0.7, 0.3])
