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
from strategies.fedavg import FedAvg
from strategies.moon import MOON, MOONClient, contrastive_loss
from tests.strategies.labelled import Classifier, WithoutDropout, assert_same, blobs, train
from tests.strategies.test_closed_forms import stores
from tests.strategies.test_personal import Normed

SUMMARY = LocalSummary(num_examples=1, num_steps=1, lr_sum=0.1)


class Plain(WithoutDropout):
    """The small network without dropout; it counts its forward passes."""

    passes = 0

    def forward(self, inputs):
        Plain.passes += 1
        return super().forward(inputs)


def federated(strategy, rounds, model=Plain, **how):
    return train(strategy, rounds, model, blobs(2), batch_size=100, **how)[0]


ALONG, ACROSS = [1.0, 0.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("features", "others", "tau", "expected"),
    [
        # z along z_glob, whatever their lengths
        ([[3.0, 0.0]], [[ALONG], [[0.0, 2.0]]], 0.5, math.log(1 + math.exp(-2))),
        ([[3.0, 0.0]], [[ALONG], [[-5.0, 0.0]]], 0.5, math.log(1 + math.exp(-4))),
        ([[3.0, 0.0]], [[ALONG], [[0.0, 2.0]], [[0.0, -1.0]]], 0.5, math.log(1 + 2 / math.e**2)),
        # where global and previous model agree
        ([[3.0, 0.0]], [[ALONG], [[7.0, 0.0]]], 0.5, math.log(2)),
        # the mean over a batch
        (
            [ALONG, ACROSS],
            [[ALONG] * 2, [ACROSS] * 2],
            *(1.0, (math.log(1 + 1 / math.e) + math.log(1 + math.e)) / 2),
        ),
    ],
)
def test_moon_by_hand(features, others, tau, expected):
    others = [torch.tensor(other) for other in others]
    found = contrastive_loss(torch.tensor(features), others, tau=tau)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_what_is_kept_gives_the_same_features_after_a_restart():
    """All tensors, the statistics of BatchNorm too, in eval mode."""
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    trained, state, store = Normed(), {}, ContextStateStore(RecordDict())
    trained(inputs)  # moves the running statistics
    MOONClient().end(SimpleNamespace(model=trained, state=state), SUMMARY)
    store.save("run", 1, state, keep=())
    received, side = Normed().eval(), MOONClient()
    side.begin(SimpleNamespace(state=store.load("run", 1), global_model=received))
    [previous] = side.contrasted
    assert not previous.training
    assert torch.equal(previous(inputs)[0], trained.eval()(inputs)[0])
    assert not torch.equal(previous(inputs)[0], received(inputs)[0])


def test_the_oldest_previous_model_goes():
    model, state = nn.Linear(1, 1, bias=False), {}
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model.weight, value)
        MOONClient(previous=2).end(SimpleNamespace(model=model, state=state), SUMMARY)
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
            model = Plain()
            model.load_state_dict(shared.state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            for _ in range(2):
                features, logits = model(data.inputs)
                loss = F.cross_entropy(logits, data.labels)
                if previous[i] is not None:
                    cosines = [
                        F.cosine_similarity(features, other(data.inputs)[0].detach())
                        for other in (shared, previous[i])
                    ]
                    first = torch.zeros(len(data), dtype=torch.int64)
                    loss = loss + mu * F.cross_entropy(torch.stack(cosines, 1) / tau, first)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
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


@pytest.mark.slow
def test_moon_at_zero_neither_looks_nor_keeps():
    passes = {}
    for name, strategy in {"fedavg": FedAvg(), "off": MOON(0.0), "on": MOON()}.items():
        own, Plain.passes = stores(), 0
        federated(strategy, rounds=2, stores=own)
        passes[name] = Plain.passes
        kept = sum(len(store.records.array_records) for store in own.values())
        assert kept == (4 if name == "on" else 0)  # the last two versions of two clients
    assert passes["off"] == passes["fedavg"]
    assert passes["on"] == passes["fedavg"] + 2 * 2 * 2  # two steps, two clients, two frozen models


@pytest.mark.slow
def test_the_first_round_of_moon_is_fedavgs_and_the_second_is_not():
    """Dropout draws the same numbers, since the frozen models draw none."""
    assert_same(*(federated(strategy, 1, Classifier) for strategy in (MOON(), FedAvg())))
    second = [federated(strategy, 2, Classifier) for strategy in (MOON(), FedAvg())]
    assert not torch.equal(*(params["head.weight"] for params in second))
