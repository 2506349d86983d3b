"""MOON: its term by hand, its previous models, and its rounds against a plain loop."""

import math
from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn import functional as F

from fedhet.client_app.state import ContextStateStore
from fedhet.strategies.base import LocalSummary
from fedhet.strategies.components.local_training_config import LocalTrainingConfig, Phase
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.moon import MOON, contrastive_loss
from tests.strategies.labelled import WithoutDropout, blobs, train
from tests.strategies.sides import built, client_side
from tests.strategies.test_personal import Normed

HEAD = TensorSelector("head.*")
SUMMARY = LocalSummary(num_examples=1, num_steps=1, lr_sum=0.1)


ALONG, ACROSS = [1.0, 0.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("features", "others", "tau", "expected"),
    [
        # z along z_glob, whatever their lengths
        ([[3.0, 0.0]], [[ALONG], [[0.0, 2.0]]], 0.5, math.log(1 + math.exp(-2))),
        ([[3.0, 0.0]], [[ALONG], [[0.0, 2.0]], [[0.0, -1.0]]], 0.5, math.log(1 + 2 / math.e**2)),
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
    client_side(MOON).end(SimpleNamespace(model=trained, state=state), SUMMARY)
    store.save("run", 1, state, keep=())
    received, side = Normed().eval(), client_side(MOON)
    side.begin(SimpleNamespace(state=store.load("run", 1), global_model=received))
    [previous] = side.contrasted
    assert not previous.training
    assert torch.equal(previous(inputs)[0], trained.eval()(inputs)[0])
    assert not torch.equal(previous(inputs)[0], received(inputs)[0])


def test_the_oldest_previous_model_goes():
    model, state = nn.Linear(1, 1, bias=False), {}
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model.weight, value)
        client_side(MOON, previous=2).end(SimpleNamespace(model=model, state=state), SUMMARY)
    kept = {name: tensors["weight"].item() for name, tensors in state.items()}
    assert kept == {"moon-previous-0": 3.0, "moon-previous-1": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("phases", [(), (Phase(TensorSelector("body.*"), 1), Phase(HEAD))])
def test_three_rounds_of_moon_against_a_plain_loop(phases):
    """Two clients, two steps on all data, of all tensors or of the body and then the head."""
    datasets, mu, tau, lr = blobs(2), 3.0, 0.5, 0.2
    shared, previous = WithoutDropout(), [None, None]
    for _ in range(3):
        trained = []
        for i, data in enumerate(datasets):
            model = WithoutDropout()
            model.load_state_dict(shared.state_dict())
            parts = (model.body, model.head) if phases else (model, model)
            for part in parts:
                features, logits = model(data.inputs)
                loss = F.cross_entropy(logits, data.labels)
                if previous[i] is not None:
                    cosines = [
                        F.cosine_similarity(features, other(data.inputs)[0].detach())
                        for other in (shared, previous[i])
                    ]
                    first = torch.zeros(len(data), dtype=torch.int64)
                    loss = loss + mu * F.cross_entropy(torch.stack(cosines, 1) / tau, first)
                model.zero_grad()
                loss.backward()
                torch.optim.SGD(part.parameters(), lr=lr).step()
            trained.append(model)
        previous, shares = trained, [len(data) / sum(map(len, datasets)) for data in datasets]
        mean = {
            name: sum(w * m.state_dict()[name] for w, m in zip(shares, trained, strict=True))
            for name in shared.state_dict()
        }
        shared = WithoutDropout()
        shared.load_state_dict(mean)
    options = LocalTrainingConfig(batch_size=100, epochs=2, phases=phases)
    params, _ = train(
        built(MOON, mu=mu, tau=tau, local_lr=lr), 3, WithoutDropout, datasets, options=options
    )
    for name, value in shared.state_dict().items():
        torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-4)


def test_moon_at_zero_keeps_nothing():
    context = SimpleNamespace(model=nn.Linear(1, 1), state={})
    assert client_side(MOON, mu=0.0).end(context, SUMMARY) == context.state == {}
