"""MOON: its term by hand, its previous models, and where it is FedAvg."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn import functional as F

from client_app.state import ContextStateStore
from strategies.base import LocalSummary
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.fedavg import FedAvg
from strategies.moon import MOON, MOONClient, contrastive_loss
from tests.federation import federate
from tests.strategies.test_reductions import Classifier, WithoutDropout, assert_same, blobs

SUMMARY = LocalSummary(num_examples=1, num_steps=1, lr_sum=0.1)


class Plain(WithoutDropout):
    """The small network without dropout; it counts its forward passes."""

    passes = 0

    def forward(self, inputs):
        Plain.passes += 1
        return super().forward(inputs)


def federated(strategy, rounds, **how):
    settings = {"model": Plain, "options": LocalTrainingConfig(batch_size=100, epochs=2), **how}
    params, _ = federate(strategy, blobs(2), loss=F.cross_entropy, rounds=rounds, **settings)
    return params


# ---- the term ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "expected"),
    [
        ([[0.0, 2.0]], math.log(1 + math.exp(-2))),  # cosines 1 and 0, over tau = .5
        ([[-5.0, 0.0]], math.log(1 + math.exp(-4))),
        ([[0.0, 2.0], [0.0, -1.0]], math.log(1 + 2 * math.exp(-2))),
        ([[7.0, 0.0]], math.log(2)),  # where global and previous model agree
    ],
)
def test_moon_by_hand(previous, expected):
    """With z along z_glob, whatever their lengths."""
    features = torch.tensor([[3.0, 0.0]])
    others = [torch.tensor([vector]) for vector in ([1.0, 0.0], *previous)]
    assert contrastive_loss(features, others, tau=0.5).item() == pytest.approx(expected, abs=1e-6)


def test_moon_is_the_mean_over_the_batch():
    features, known = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    unknown = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2
    assert contrastive_loss(features, [known, unknown], tau=1.0).item() == pytest.approx(
        expected, abs=1e-6
    )


# ---- the previous models -------------------------------------------------------------------------


class Normalised(nn.Module):
    """A network with BatchNorm, whose buffers are part of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)

    def forward(self, inputs):
        features = self.body(inputs)
        return features, self.head(features)


def test_what_is_kept_gives_the_same_features_after_a_restart():
    """Of a client that has trained, stored its state and is built anew: all tensors, eval mode."""
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    trained, state, store = Normalised(), {}, ContextStateStore(RecordDict())
    trained(inputs)  # moves the running statistics
    MOONClient().end(SimpleNamespace(model=trained, state=state), SUMMARY)
    store.save("run", 1, state, keep=())
    received = Normalised().eval()
    side = MOONClient()
    side.begin(SimpleNamespace(state=store.load("run", 1), global_model=received))
    [previous] = side.contrasted
    assert not previous.training
    assert torch.equal(previous(inputs)[0], trained.eval()(inputs)[0])
    assert not torch.equal(previous(inputs)[0], received(inputs)[0])


def test_the_oldest_previous_model_goes():
    model, state = nn.Linear(1, 1, bias=False), {}
    context = SimpleNamespace(model=model, state=state)
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model.weight, value)
        MOONClient(previous=2).end(context, SUMMARY)
    kept = {name: tensors["weight"].item() for name, tensors in state.items()}
    assert kept == {"moon-previous-0": 3.0, "moon-previous-1": 2.0}


@pytest.mark.slow
def test_three_rounds_of_moon_against_a_plain_loop():
    """Two clients, all steps on all data; every message builds its client anew."""
    datasets, mu, tau, lr = blobs(2), 3.0, 0.5, 0.2
    shared, previous = Plain(), [None, None]
    for _ in range(3):
        trained = []
        for i, data in enumerate(datasets):
            model, weights = Plain(), shared.state_dict()
            model.load_state_dict(weights)
            for _ in range(2):
                features, logits = model(data.inputs)
                loss = F.cross_entropy(logits, data.labels)
                if previous[i] is not None:
                    cosines = [
                        (F.normalize(features) * F.normalize(other(data.inputs)[0].detach())).sum(1)
                        for other in (shared, previous[i])
                    ]
                    first = torch.zeros(len(data), dtype=torch.int64)
                    loss = loss + mu * F.cross_entropy(torch.stack(cosines, 1) / tau, first)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for param, grad in zip(model.parameters(), grads, strict=True):
                        param -= lr * grad
            trained.append(model)
        previous, shares = trained, [len(data) / sum(map(len, datasets)) for data in datasets]
        mean = {
            name: sum(w * m.state_dict()[name] for w, m in zip(shares, trained, strict=True))
            for name in shared.state_dict()
        }
        shared = Plain()
        shared.load_state_dict(mean)
    params = federated(MOON(mu, tau, local_lr=lr), rounds=3)
    for name, value in shared.state_dict().items():
        torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-4)


# ---- where it is another method ------------------------------------------------------------------


@pytest.mark.slow
def test_moon_at_zero_neither_looks_nor_keeps():
    passes = {}
    for name, strategy in {"fedavg": FedAvg(), "off": MOON(0.0), "on": MOON()}.items():
        stores = {i: ContextStateStore(RecordDict()) for i in range(2)}
        before = Plain.passes
        federated(strategy, rounds=2, stores=stores)
        passes[name] = Plain.passes - before
        kept = sum(len(store.records.array_records) for store in stores.values())
        assert kept == (4 if name == "on" else 0)  # the last two versions of two clients
    assert passes["off"] == passes["fedavg"]
    assert passes["on"] == passes["fedavg"] + 2 * 2 * 2  # two steps, two clients, two frozen models


@pytest.mark.slow
def test_the_first_round_of_moon_is_fedavgs_and_the_second_is_not():
    """Dropout draws the same numbers, since the frozen models draw none."""
    first = [federated(s, 1, model=Classifier) for s in (MOON(), FedAvg())]
    assert_same(*first)
    second = [federated(s, 2, model=Classifier)["head.weight"] for s in (MOON(), FedAvg())]
    assert not torch.equal(*second)
