"""Five rounds of methods against a plain loop, in float64, with all that a run has at once.

Mini-batches; clients of unequal size, one of a single class, which sit rounds out; BatchNorm;
momentum, weight decay, clipping, and a falling step size; stopped after round 2 and resumed.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training import seeded
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.schedules import ExponentialDecay
from fedhet.strategies.feddecorr import FedDecorr
from fedhet.strategies.fedlc import FedLC, LogitAdjustment
from fedhet.strategies.fedntd import FedNTD
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.fedsmoo import DualSAM, FedSMOO
from fedhet.strategies.fedspeed import FedSpeed
from fedhet.strategies.feduv import FedUV
from tests.federation import TensorBatches, federate
from tests.strategies.sides import built
from tests.strategies.test_closed_forms import Listed, stores

COHORTS, SIZES, BATCH = ([0, 1, 2], [1, 3], [0, 2, 3], [0, 1, 3], [2, 3]), (17, 23, 9, 12), 6
LR, DECAY, MOMENTUM, WEIGHT_DECAY, CLIP, SERVER = 0.2, 0.8, 0.5, 0.01, 1.3, 0.7
Tensors = dict[str, Tensor]
Loss = Callable[[nn.Module, nn.Module, Tensor, Tensor, TensorBatches], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
            self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(inputs)
        return features, self.head(features)


def floats(model: nn.Module) -> Tensors:
    return {n: v.clone() for n, v in model.state_dict().items() if v.is_floating_point()}


def clients() -> list[TensorBatches]:
    draw, found = torch.Generator().manual_seed(11), []
    for i, size in enumerate(SIZES):
        labels = torch.randint(0, 3, (size,), generator=draw) if i != 2 else torch.ones(size).long()
        inputs = (
            torch.randn(size, 4, generator=draw).double() + 1.5 * F.one_hot(labels, 4) + 0.3 * i
        )
        found.append(TensorBatches(inputs, labels, num_classes=3))
    return found


def batches(data: TensorBatches, round: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    with seeded(0, round, client, torch.device("cpu")) as (draw, _):
        orders = [torch.randperm(len(data), generator=draw) for _ in range(2)]
    for part in (part for order in orders for part in order.split(BATCH)):
        yield data.inputs[part], data.labels[part]


def slopes(loss: Tensor, model: nn.Module) -> Tensors:
    params = dict(model.named_parameters())
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def length(tensors: Tensors) -> float:
    return float(torch.cat([value.flatten() for value in tensors.values()]).norm())


@torch.no_grad()
def put(model: nn.Module, values: Tensors) -> None:
    for name, value in values.items():
        model.get_parameter(name).copy_(value)


def by_hand(loss: Loss, mu: float | None = None, rho: float = 0.0, *, common: bool = False):
    """Return x; with ``mu`` by FedSpeed's steps and server, or FedSMOO's if ``common``."""
    data, x, names = clients(), floats(Net()), list(dict(Net().named_parameters()))
    zero = {name: torch.zeros_like(x[name]) for name in names}
    h, dual, total, s = dict.fromkeys(range(4), zero), dict.fromkeys(range(4), zero), zero, zero
    for t, cohort in enumerate(COHORTS, start=1):
        trained = []
        for i in cohort:
            model, received = Net(), Net().eval()
            for one in (model, received):
                one.load_state_dict(x, strict=False)
            optimizer = torch.optim.SGD(
                model.parameters(), LR * DECAY ** (t - 1), MOMENTUM, weight_decay=WEIGHT_DECAY
            )
            for inputs, labels in batches(data[i], t, i):
                y = {n: p.detach().clone() for n, p in model.named_parameters()}
                grads = slopes(loss(model, received, inputs, labels, data[i]), model)
                if mu is not None:
                    v = {n: g - dual[i][n] - s[n] for n, g in grads.items()} if common else grads
                    e = {n: rho * one / (length(v) + 1e-7) for n, one in v.items()}
                    if common:
                        dual[i] = {n: m + e[n] - s[n] for n, m in dual[i].items()}
                    put(model, {n: y[n] + e[n] for n in names})
                    grads = slopes(loss(model, received, inputs, labels, data[i]), model)
                    put(model, y)
                    grads = {n: g + mu * (y[n] - x[n] + h[i][n]) for n, g in grads.items()}
                for name, param in model.named_parameters():
                    param.grad = grads[name]
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
            trained.append(floats(model))
            h[i] = {n: value + trained[-1][n] - x[n] for n, value in h[i].items()}
        by_size = [SIZES[i] / sum(SIZES[i] for i in cohort) for i in cohort]
        plain = [1 / len(cohort)] * len(cohort)
        moved = {}
        for name, value in x.items():
            weights = plain if mu is not None and name in names else by_size
            pairs = zip(weights, trained, strict=True)
            moved[name] = sum((w * (y[name] - value) for w, y in pairs), 0 * value)
        step = 1.0 if mu is not None else SERVER
        new = {n: v + (step if n in names else 1.0) * moved[n] for n, v in x.items()}
        if mu is not None:
            total = {n: v + len(cohort) / 4 * moved[n] for n, v in total.items()}
            new |= {n: new[n] + total[n] for n in names}
            mean = {n: sum((dual[i][n] for i in cohort), zero[n]) / len(cohort) for n in names}
            s = {n: rho * v / (length(mean) + 1e-7) for n, v in mean.items()} if common else zero
        x = new
    return x


def stopped_and_resumed(method, optimizer, **given) -> Tensors:
    buffers, kept = [name for name, _ in Net().named_buffers()], stores(4)
    options = LocalTrainingConfig(batch_size=BATCH, epochs=2, clip=CLIP)
    given |= {"local_lr": LR, "schedule": ExponentialDecay(decay=DECAY), "buffers": buffers}
    how = {"model": Net, "loss": F.cross_entropy, "options": options, "stores": kept}
    x: list[Tensors] = []

    def note(report, arrays):
        assert not report.failures
        x.append({name: torch.from_numpy(arrays[name].numpy().copy()) for name in arrays})

    first, second = (built(method, sampler=Listed(*COHORTS), **given) for _ in range(2))
    plain = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    how |= {"optimizer": partial(optimizer, **plain), "on_round": note}
    federate(first, clients(), rounds=2, **how)
    second.restore(first.snapshot())
    federate(second, clients(), rounds=5, initial=x[-1], **how)
    return x[-1]


def plain(model, received, inputs, labels, data):
    return F.cross_entropy(model(inputs)[1], labels)


def odds(model, inputs, labels, weights):
    """Cross-entropy of a softmax whose classes have these odds."""
    found = model(inputs)[1].exp() * weights
    return -(found[torch.arange(len(labels)), labels] / found.sum(1)).log().mean()


def counts(data: TensorBatches) -> Tensor:
    return torch.tensor(data.class_counts()).double()


def fedlc(model, received, inputs, labels, data):
    return odds(model, inputs, labels, torch.exp(-0.9 * counts(data) ** -0.25))


def adjusted(model, received, inputs, labels, data):
    return odds(model, inputs, labels, counts(data) ** 0.6)


def fedprox(model, received, inputs, labels, data):
    pairs = zip(model.parameters(), received.parameters(), strict=True)
    apart = sum((y - x.detach()).square().sum() for y, x in pairs)
    return plain(model, received, inputs, labels, data) + 0.15 * apart


def feddecorr(model, received, inputs, labels, data):
    features, logits = model(inputs)
    apart = features - features.mean(0)
    scaled = apart / (apart.square().sum(0) / (len(inputs) - 1) + 1e-8).sqrt()
    correlations = scaled.T @ scaled
    others = correlations[~torch.eye(6, dtype=torch.bool)]
    return F.cross_entropy(logits, labels) + 0.2 * others.square().mean() / len(inputs)


def fedntd(model, received, inputs, labels, data):
    logits, total = model(inputs)[1], torch.zeros(()).double()
    for mine, theirs, label in zip(logits, received(inputs)[1].detach(), labels, strict=True):
        kept = [c for c in range(3) if c != label]
        q, p = (mine[kept] / 1.7).softmax(0), (theirs[kept] / 1.7).softmax(0)
        total = total + (p * (p / q).log()).sum()
    return F.cross_entropy(logits, labels) + 0.8 * total / len(labels)


def feduv(model, received, inputs, labels, data):
    features, logits = model(inputs)
    missing = (3**-0.5 - logits.softmax(1).std(0)).clamp_min(0).mean()
    distances = torch.pdist(features).square()
    crowded = torch.exp(-distances / distances.median()).mean()
    return F.cross_entropy(logits, labels) + 2.5 * missing + 0.5 * crowded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "given", "loss"),
    [
        (FedProx, {"mu": 0.3}, fedprox),
        (FedLC, {"tau": 0.9}, fedlc),
        (LogitAdjustment, {"tau": 0.6}, adjusted),
        (FedDecorr, {"beta": 0.2}, feddecorr),
        (FedNTD, {"beta": 0.8, "tau": 1.7}, fedntd),
        (FedUV, {}, feduv),
    ],
)
def test_methods_with_a_loss_of_their_own(method, given, loss):
    found = stopped_and_resumed(method, SGD, server_lr=SERVER, **given)
    torch.testing.assert_close(found, by_hand(loss), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "given"),
    [(FedSpeed, {"mu": 0.3}), (FedSMOO, {"mu": 0.3, "rho": 0.15})],
)
def test_fedspeed_and_fedsmoo(method, given):
    common = method is FedSMOO
    found = stopped_and_resumed(method, partial(DualSAM, rho=0.15), **given)
    expected = by_hand(plain, 0.3, 0.15, common=common)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
