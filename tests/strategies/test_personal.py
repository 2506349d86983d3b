"""FedPer, FedRep, FedBABU, Local and Centralised against plain PyTorch, and buffers."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.conf import compose
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.fedavg import Centralised, FedAvg, Local
from fedhet.strategies.fedbabu import FedBABU
from fedhet.strategies.fedper import FedPer
from fedhet.strategies.fedrep import FedRep
from fedhet.strategies.method import Method
from tests.federation import TensorBatches
from tests.recipes import overrides
from tests.refused import refused
from tests.strategies.labelled import WithoutDropout, assert_same, blobs, train
from tests.strategies.sides import built, per_fedavg
from tests.strategies.test_closed_forms import stores
from tests.strategies.test_phases import phases_of

State = dict[str, Tensor]
BODY, HEAD = ["body.0.weight", "body.0.bias"], ["head.weight", "head.bias"]
BUFFERS = ["body.1.running_mean", "body.1.running_var"]
WHOLE = 1000  # a batch size: one step an epoch, whose gradient no order of the examples changes


def exact() -> nn.Module:
    return WithoutDropout().double()


def exact_blobs(num_clients: int) -> list[TensorBatches]:
    return [TensorBatches(d.inputs.double(), d.labels, 3) for d in blobs(num_clients)]


class Normed(nn.Module):
    """BatchNorm on the body's second place; its input does not depend on a trained tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4), nn.Linear(4, 8))
        self.head = nn.Linear(8, 3)
        for param in self.parameters():
            nn.init.constant_(param, 0.1)

    def forward(self, inputs):
        features = self.body(inputs)
        return features, self.head(features)


def plain_loop(model, data, epochs, optimizer=torch.optim.SGD) -> State:
    """Train with PyTorch's own optimizer; ``epochs``: how many, of which tensors, in order."""
    params = dict(model.named_parameters())
    optimizer = optimizer(params.values(), lr=0.1)
    for count, names in epochs:
        for _ in range(count):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.inputs)[1], data.labels)
            loss.backward(inputs=[params[name] for name in names])
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def assert_close(left: State, right: State, names: Iterable[str]) -> None:
    for name in names:
        torch.testing.assert_close(left[name], right[name], atol=1e-12, rtol=1e-12, msg=name)


def run(strategy: Method, rounds: int = 3, model=exact, clients: int = 2, **how):
    """Return the final params, what each client kept, and the reports."""
    kept = stores(clients)
    personal = strategy.settings.get("strategy.personal", "none")
    how = {"data": exact_blobs(clients), "batch_size": WHOLE, "personal": personal, **how}
    params, reports = train(strategy, rounds, model, stores=kept, **how)
    states = [store.load(strategy.state.experiment, rounds) for store in kept.values()]
    return params, [dict(state.get("personal", {})) for state in states], reports


def by_hand(rounds, epochs, optimizer=torch.optim.SGD) -> tuple[State, list[State]]:
    data = exact_blobs(2)
    shares = [len(d) / sum(map(len, data)) for d in data]
    models = [exact(), exact()]
    for _ in range(rounds):
        local = [plain_loop(m, d, epochs, optimizer) for m, d in zip(models, data, strict=True)]
        body = {n: sum(s * y[n] for s, y in zip(shares, local, strict=True)) for n in BODY}
        for model in models:
            model.load_state_dict(body, strict=False)
    return body, local


OPTIMIZERS = [
    (lambda: SGD(momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
    (Adam, torch.optim.Adam),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS)
@pytest.mark.parametrize(
    ("strategy", "epochs"),
    [(FedPer, [(3, BODY + HEAD)]), (FedRep, [(1, HEAD), (2, BODY)]), (FedBABU, [(3, BODY)])],
)
def test_fedper_fedrep_and_fedbabu_by_hand(strategy, epochs, ours, theirs):
    """Three rounds; bodies are averaged by examples, heads stay; FedBABU's never changes."""
    options = LocalTrainingConfig(batch_size=WHOLE, epochs=3, phases=phases_of(strategy))
    params, own, reports = run(built(strategy, local_lr=0.1), optimizer=ours, options=options)
    body, local = by_hand(3, epochs, theirs)
    assert list(params) == BODY
    assert_close(params, body, BODY)
    for mine, expected in zip(own, local, strict=True):
        assert set(mine) == set(HEAD)
        assert_close(mine, expected, HEAD)
        if strategy is FedBABU:
            assert_same(mine, {name: exact().state_dict()[name] for name in HEAD})
    apart = (own[0]["head.weight"] - own[1]["head.weight"]).abs().max()
    assert (apart > 0.1) == (strategy is not FedBABU)
    sent = sum(128 + 8 * value.numel() for value in params.values())  # each array has a header
    assert [(r.bytes_down, r.bytes_up) for r in reports[1:]] == [(2 * sent,) * 2] * 3


@pytest.mark.slow
def test_local_is_a_training_of_its_own_at_every_client():
    """Three rounds of two epochs are six, nothing travels, and a client kept its whole model."""
    params, own, reports = run(built(Local, local_lr=0.1))
    assert params == {}
    assert all(report.bytes_up == report.bytes_down == 0 for report in reports)
    for mine, data in zip(own, exact_blobs(2), strict=True):
        assert_close(mine, plain_loop(exact(), data, [(6, BODY + HEAD)]), BODY + HEAD)


@pytest.mark.slow
def test_one_client_is_centralised_sgd():
    """K steps of one client a round, R rounds, equal K * R steps of SGD on its data."""
    expected = plain_loop(exact(), exact_blobs(1)[0], [(6, BODY + HEAD)])
    for strategy in (Centralised, FedAvg):
        params, _, _ = run(built(strategy, local_lr=0.1), clients=1)
        assert_close(params, expected, BODY + HEAD)
    with refused("clients=3", "clients=1", kind=ValueError):
        compose(overrides("strategy=centralised", "clients=3"))


KEPT = [(spec, SGD) for spec in ("none", "head.*", "last:2", "body.*", "all")]


@pytest.mark.parametrize(("personal", "optimizer"), [*KEPT, ("none", per_fedavg)])
def test_batchnorm_statistics_by_hand(personal, optimizer):
    """A pass moves the running mean by a tenth of the way to the mean of the inputs.

    Shared, it is averaged by examples after a round's two; kept, it goes on through all six.
    Per-FedAvg takes a round's two passes for one step.
    """
    data, strategy = blobs(2), built(FedAvg, local_lr=0.1, buffers=BUFFERS)
    how = {"model": Normed, "data": data, "personal": personal, "optimizer": optimizer}
    params, own, _ = run(strategy, **how)
    means = [part.inputs.mean(0) for part in data]
    if personal not in ("body.*", "all"):
        assert all(BUFFERS[0] not in mine for mine in own)
        mean = torch.cat([part.inputs for part in data]).mean(0)
        torch.testing.assert_close(params[BUFFERS[0]], (1 - 0.9**6) * mean)
        return
    assert not set(BUFFERS) & set(params)
    for mine, mean in zip(own, means, strict=True):
        torch.testing.assert_close(mine[BUFFERS[0]], (1 - 0.9**6) * mean)
        assert "body.1.num_batches_tracked" not in mine
