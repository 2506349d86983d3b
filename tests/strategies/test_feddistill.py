"""FedDistill+: its term by hand, its first round, and the statistic it shares with FedDW."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from conf import build_part, compose
from strategies.base import Step
from strategies.fedavg import FedAvg
from strategies.feddistill import FedDistill, FedDistillClient
from strategies.round.federated import FederatedStrategy
from strategies.statistics.class_means import MEANS
from strategies.statistics.soft_labels import SOFT_LABELS
from tests.federation import TensorBatches
from tests.recipes import overrides
from tests.strategies.labelled import Biasless, Classifier, blobs, train


def penalty(logits, labels, soft_labels, coefficient=1.0):
    context = SimpleNamespace(received={SOFT_LABELS: {MEANS: soft_labels}})
    step = Step({}, logits, labels, logits, logits, context)
    return FedDistillClient(coefficient).penalty(step)


def test_feddistill_by_hand():
    """Example 0 says (3/4, 1/4) and 1 says (1/2, 1/2); the class of both is taught (1/2, 1/2).

    Against the identity, as for a class that nobody has held yet, it is the cross-entropy.
    """
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    labels, soft_labels = torch.tensor([1, 1]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    one = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert penalty(logits, labels, soft_labels).item() == pytest.approx(one / 2)
    assert penalty(logits, labels, soft_labels, 3.0).item() == pytest.approx(3 * one / 2)
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 3, 1, 1, 2])
    found = penalty(logits, labels, torch.eye(4))
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


def test_the_first_round_has_the_loss_twice():
    """SL is the identity: (1 + lambda) CE at the rate eta is CE at the rate (1 + lambda) eta."""
    doubled, _ = train(FedDistill(1.0, local_lr=0.05), 1, Classifier, blobs(2), epochs=1)
    plain, _ = train(FedAvg(local_lr=0.1), 1, Classifier, blobs(2), epochs=1)
    for name, value in plain.items():
        torch.testing.assert_close(doubled[name], value, atol=1e-6, rtol=1e-5)


def test_a_class_that_nobody_held_is_still_taught_as_the_identity():
    data, strategy = blobs(1)[0], FedDistill(local_lr=0.1)
    held = data.labels != 2
    data = TensorBatches(data.inputs[held], data.labels[held], num_classes=3)
    train(strategy, 1, Classifier, [data], epochs=1)
    soft_labels = strategy.server_sides["soft_labels"].broadcast(0)[SOFT_LABELS][MEANS]
    assert soft_labels[2].tolist() == [0.0, 0.0, 1.0]
    assert soft_labels[:2].sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert soft_labels[:2].max() < 1.0


@pytest.mark.slow
def test_with_feddw_nothing_is_sent_twice():
    """An array is its data and 128 bytes: SL (3, 3) down, sums (3, 3) and counts (3,) up."""
    recipe = compose(overrides("strategy=[feddistill,feddw]"))
    sides = ("client_sides", "server_sides")
    strategy = FederatedStrategy(**{s: build_part(recipe, f"strategy.{s}", 1) for s in sides})
    params, (_, *reports) = train(strategy, 2, Biasless, blobs(2), epochs=1)
    model = sum(128 + 4 * value.numel() for value in params.values())
    assert [r.bytes_down for r in reports] == [2 * (model + 128 + 4 * 9)] * 2
    assert [r.bytes_up for r in reports] == [2 * (model + 128 + 4 * 9 + 128 + 4 * 3)] * 2
