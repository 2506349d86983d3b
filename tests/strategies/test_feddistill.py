"""FedDistill+: its term by hand and its soft labels."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedhet.strategies.base import Step
from fedhet.strategies.feddistill import FedDistill
from fedhet.strategies.statistics.class_means import MEANS
from fedhet.strategies.statistics.soft_labels import SOFT_LABELS
from tests.federation import TensorBatches
from tests.strategies.labelled import Classifier, blobs, train
from tests.strategies.sides import built, client_side


def penalty(logits, labels, soft_labels, coefficient=1.0):
    context = SimpleNamespace(received={SOFT_LABELS: {MEANS: soft_labels}})
    step = Step({}, logits, labels, logits, logits, context)
    return client_side(FedDistill, coefficient=coefficient).penalty(step)


def test_feddistill_by_hand():
    """They say (3/4, 1/4) and (1/2, 1/2); the class of both is taught (1/2, 1/2)."""
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    labels, soft_labels = torch.tensor([1, 1]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    one = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert penalty(logits, labels, soft_labels).item() == pytest.approx(one / 2)
    assert penalty(logits, labels, soft_labels, 3.0).item() == pytest.approx(3 * one / 2)
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 3, 1, 1, 2])
    found = penalty(logits, labels, torch.eye(4))
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


def test_a_class_that_nobody_held_is_still_taught_as_the_identity():
    data, strategy = blobs(1)[0], built(FedDistill, local_lr=0.1)
    held = data.labels != 2
    data = TensorBatches(data.inputs[held], data.labels[held], num_classes=3)
    train(strategy, 1, Classifier, [data], epochs=1)
    soft_labels = strategy.server_sides["soft_labels"].broadcast(0)[SOFT_LABELS][MEANS]
    assert soft_labels[2].tolist() == [0.0, 0.0, 1.0]
    assert soft_labels[:2].sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert soft_labels[:2].max() < 1.0
