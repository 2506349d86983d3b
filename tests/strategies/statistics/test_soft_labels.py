"""Soft labels by class: what a client sends, and what the server makes of it."""

import copy

import pytest
import torch
from torch import Tensor

from fedhet.strategies.base import Cohort, LocalSummary
from fedhet.strategies.statistics.class_means import COUNTS, MEANS, SUMS
from fedhet.strategies.statistics.soft_labels import (
    SOFT_LABEL_SUMS,
    SOFT_LABELS,
    SoftLabels,
    SoftLabelServer,
)
from tests.federation import TensorBatches
from tests.refused import refused
from tests.strategies.labelled import Biasless, context_of, upload
from tests.strategies.sides import client_side, server_side, total_of

COHORT = Cohort(round=1, size=1, num_clients=1)


def server(classes: int = 2, **options) -> SoftLabelServer:
    side = server_side(SoftLabels, **options)
    side.init({"head.weight": torch.zeros(classes, 5)})
    return side


def matrix(side: SoftLabelServer) -> Tensor:
    return side.broadcast(0)[SOFT_LABELS][MEANS]


class Unaugmented(TensorBatches):
    def batches(self, batch_size, *, generator, train):
        assert not train
        return super().batches(batch_size, generator=generator, train=train)


def test_a_client_sends_what_adding_up_one_example_at_a_time_gives():
    """More examples than go through at once, a class that it has not, dropout switched off."""
    generator = torch.Generator().manual_seed(0)
    labels = 2 * torch.randint(0, 2, (1203,), generator=generator)
    data = Unaugmented(torch.randn(1203, 4, generator=generator), labels, num_classes=3)
    model = Biasless().train()
    summary = LocalSummary(1203, 1, 0.1)
    sent = client_side(SoftLabels).end(context_of(model, data), summary)[SOFT_LABEL_SUMS]

    hidden = model.body[0].double()(data.inputs.double()).clamp_min(0)
    exponentials = (hidden @ model.head.weight.double().T).exp().detach()
    sums, counts = torch.zeros(3, 3, dtype=torch.float64), [0, 0, 0]
    for row, label in zip(exponentials, labels.tolist(), strict=True):
        sums[label] += row / row.sum()
        counts[label] += 1
    assert sent[COUNTS].tolist() == counts
    assert counts[1] == 0
    torch.testing.assert_close(sent[SUMS].double(), sums, atol=1e-3, rtol=1e-6)


# Class 0: 2 + 1 examples in round 1, none in 2, 1 in 3. Class 1: none, 2, none.
NONE = [0.0, 0.0]
ROUNDS = [
    [upload(0, [[1.6, 0.4], NONE], [2.0, 0.0]), upload(1, [[0.2, 0.8], NONE], [1.0, 0.0])],
    [upload(1, [NONE, [0.5, 1.5]], [0.0, 2.0])],
    [upload(0, [[0.3, 0.7], NONE], [1.0, 0.0])],
]
KEEP = [[[0.6, 0.4], [0, 1]], [[0.6, 0.4], [0.25, 0.75]], [[0.3, 0.7], [0.25, 0.75]]]
BY_HAND = [
    ({}, KEEP),
    ({"absent": "identity"}, [[[0.6, 0.4], [0, 1]], [[1, 0], [0.25, 0.75]], [[0.3, 0.7], [0, 1]]]),
    # row 0 of round 3: (1.8 + .3, 1.2 + .7) / 4
    ({"history": "all"}, [*KEEP[:2], [[0.525, 0.475], [0.25, 0.75]]]),
    (
        {"smoothing": 0.5},
        [[[0.8, 0.2], [0, 1]], [[0.8, 0.2], [0.125, 0.875]], [[0.55, 0.45], [0.125, 0.875]]],
    ),
    (
        {"smoothing": 0.5, "history": "all", "absent": "identity"},  # the released code
        [[[0.8, 0.2], [0, 1]], [[0.7, 0.3], [0.125, 0.875]], [[0.6125, 0.3875], [0.1875, 0.8125]]],
    ),
]


@pytest.mark.parametrize(("options", "expected"), BY_HAND, ids=lambda value: str(value)[:60])
def test_three_rounds_by_hand_and_a_restored_server_goes_on_alike(options, expected):
    side = server(**options)
    assert torch.equal(matrix(side), torch.eye(2))
    assert side.broadcast(1)[SOFT_LABELS] is side.broadcast(7)[SOFT_LABELS]  # serialised once
    for replies, after in zip(ROUNDS, expected, strict=True):
        restored = server(**options)  # anew: what it is not told, it does not know
        restored.load_state_dict(copy.deepcopy(side.state_dict()))
        for one in (side, restored):
            one.reduce(total_of(replies), {}, COHORT)
            one.asked(0)
            found = matrix(one)
            torch.testing.assert_close(found, torch.tensor(after, dtype=torch.float32))
        assert torch.equal(matrix(side), found)
    assert restored.uploads == {0: 3}  # one for every message, none for a ``broadcast`` alone


def test_a_head_that_stays_at_the_clients_is_refused():
    with refused("head.weight", "strategy.personal"):
        server_side(SoftLabels).init({"body.weight": torch.zeros(3, 2)})
