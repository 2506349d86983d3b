"""DBE against its algorithm in float64: three rounds, with the offset in place."""

import pytest
import torch
from torch.nn import functional as F

from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.dbe import DBE, OFFSET
from tests.refused import refused
from tests.strategies.labelled import Biasless, train
from tests.strategies.sides import built, client_side, sam
from tests.strategies.test_closed_forms import stores
from tests.strategies.test_personal import WHOLE, exact, exact_blobs

LR, MU = 0.1, 0.3


@pytest.mark.parametrize(
    ("kappa", "optimizer"), [(0.0, SGD), (2.0, SGD), (2.0, lambda: sam(1e-12))]
)
def test_three_rounds_by_hand(kappa, optimizer):
    """Two steps a round; the offsets learn from round 2 on, and g is round 1's.

    SAM's second pass, hardly elsewhere, has the first one's offset and moving mean.
    """
    data = exact_blobs(2)
    shares = [len(one) / sum(map(len, data)) for one in data]
    x, consensus = exact(), None
    offsets = [torch.zeros(8, dtype=torch.double) for _ in data]
    for _ in range(3):
        models, means = [], []
        for i, one in enumerate(data):
            model, mean = exact(), torch.zeros(8, dtype=torch.double)
            model.load_state_dict(x.state_dict())
            offset = offsets[i].clone().requires_grad_(consensus is not None)
            for _ in range(2):
                features = model(one.inputs)[0]
                mean = (1 - MU) * mean.detach() + MU * features.mean(0)
                loss = F.cross_entropy(model.head(features + offset), one.labels)
                if consensus is not None:
                    loss = loss + kappa * (0.5 * (mean - consensus) ** 2).mean()
                moving = [*model.parameters(), *([offset] if offset.requires_grad else [])]
                slopes = torch.autograd.grad(loss, moving)
                with torch.no_grad():
                    for value, slope in zip(moving, slopes, strict=True):
                        value -= LR * slope
            offsets[i] = offset.detach()
            models.append(model)
            means.append(mean.detach())
        with torch.no_grad():
            for name, value in x.named_parameters():
                found = [dict(model.named_parameters())[name] for model in models]
                value.copy_(sum(s * one for s, one in zip(shares, found, strict=True)))
        if consensus is None:
            consensus = sum(s * mean for s, mean in zip(shares, means, strict=True))
    strategy, kept = built(DBE, kappa=kappa, mu=MU, local_lr=LR), stores(2)
    params, _ = train(strategy, 3, exact, data, WHOLE, 2, stores=kept, optimizer=optimizer)
    for name, expected in x.named_parameters():
        torch.testing.assert_close(params[name], expected.detach(), rtol=1e-10, atol=1e-12)
    for store, expected in zip(kept.values(), offsets, strict=True):
        mine = store.load(strategy.state.experiment, 3)[OFFSET][OFFSET]
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_a_classifier_without_bias_is_refused():
    with refused("task.head_bias"):
        client_side(DBE).check(Biasless(), None, [])
