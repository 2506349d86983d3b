"""FedAS against its algorithm in float64: three rounds, bodies aligned and weighted by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedhet.strategies.base import RefusedReplyError, Reply
from fedhet.strategies.fedas import LAST, TRACE, FedAS, FedASServer
from tests.strategies.labelled import blobs, train
from tests.strategies.sides import built
from tests.strategies.test_closed_forms import stores
from tests.strategies.test_personal import BODY, HEAD, WHOLE, exact, exact_blobs, plain_loop

LR = 0.1


@pytest.mark.parametrize("align", [0.0, 0.5])
def test_three_rounds_by_hand(align):
    data = exact_blobs(2)
    models = [exact() for _ in data]
    body = {n: p.detach() for n, p in exact().named_parameters() if n in BODY}
    for _ in range(3):
        traces = []
        for model, one in zip(models, data, strict=True):
            groups = [one.labels == label for label in range(3)]
            with torch.no_grad():
                old = model(one.inputs)[0]
            model.load_state_dict(body, strict=False)
            params = dict(model.named_parameters())
            new = model(one.inputs)[0]
            gaps = [((new[g] - old[g].mean(0)) ** 2).mean() for g in groups if g.any()]
            slopes = torch.autograd.grad(sum(gaps), [params[n] for n in BODY])
            with torch.no_grad():
                for name, slope in zip(BODY, slopes, strict=True):
                    params[name] -= align * slope
            plain_loop(model, one, [(2, BODY + HEAD)])
            loss = F.cross_entropy(model(one.inputs)[1], one.labels)
            slopes = torch.autograd.grad(loss, list(params.values()))
            traces.append(sum(float((s**2).sum()) for s in slopes))
        states = [model.state_dict() for model in models]
        body = {
            n: sum(a * s[n] for a, s in zip(traces, states, strict=True)) / sum(traces)
            for n in BODY
        }
    kept = stores(2)
    strategy = built(FedAS, lr=align, local_lr=LR)
    params, _ = train(strategy, 3, exact, data, WHOLE, 2, stores=kept, personal="head.*")
    torch.testing.assert_close(params, body, rtol=1e-10, atol=1e-12)
    for store, state in zip(kept.values(), states, strict=True):
        own = store.load(strategy.state.experiment, 3)
        found = {**own[LAST], **own["personal"]}
        torch.testing.assert_close(found, dict(state), rtol=1e-10, atol=1e-12)


class HeadOnly(nn.Module):
    """A linear classifier without a body."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        for param in self.parameters():
            nn.init.constant_(param, 0.1)

    def forward(self, inputs):
        return inputs, self.head(inputs)


def test_without_a_body_every_client_trains_its_head_alone():
    data, kept = blobs(2), stores(2)
    strategy = built(FedAS, local_lr=LR)
    train(strategy, 2, HeadOnly, data, WHOLE, 2, stores=kept, personal="head.*")
    for store, one in zip(kept.values(), data, strict=True):
        alone = HeadOnly()
        for _ in range(2):
            plain_loop(alone, one, [(2, HEAD)])
        own = store.load(strategy.state.experiment, 2)["personal"]
        torch.testing.assert_close(own, dict(alone.state_dict()), rtol=1e-5, atol=1e-7)


def replies(*traces: float) -> list[Reply]:
    """Clients with updates 0, 1, 2, ..."""
    return [
        Reply(i, 1, 1, 0.1, {"w": torch.tensor([float(i)])}, {TRACE: {TRACE: torch.tensor([t])}})
        for i, t in enumerate(traces)
    ]


def test_models_that_fit_perfectly_weigh_the_same():
    assert FedASServer()({}, replies(0.0, 0.0, 0.0))["w"].tolist() == [1.0]
    assert FedASServer()({}, replies(0.0, 1.0, 3.0))["w"].tolist() == [1.75]


def test_a_negative_trace_is_refused():
    with pytest.raises(RefusedReplyError):
        FedASServer().check(replies(-1.0)[0])
