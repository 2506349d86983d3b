"""FedProto: its term by hand, the prototypes by brute force, and what travels."""

import pytest
import torch

from fedhet.strategies.base import Cohort, RefusedReplyError, Reply
from fedhet.strategies.fedproto import (
    PROTOTYPE_SUMS,
    PROTOTYPES,
    FedProto,
    PrototypeServer,
    prototype_distance,
)
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold, Weights
from fedhet.strategies.statistics.class_means import COUNTS, MEANS, SUMS
from fedhet.strategies.wire.border import Expected
from tests.federation import TensorBatches
from tests.refused import refused
from tests.strategies.labelled import Classifier, blobs, train
from tests.strategies.sides import built, total_of
from tests.strategies.test_closed_forms import stores

COHORT = Cohort(round=1, size=1, num_clients=2)
CLASSES, SIZE = 4, 8  # of the blobs below; nobody holds the last class


def datasets():
    *others, last = (TensorBatches(b.inputs, b.labels, num_classes=CLASSES) for b in blobs(3))
    held = last.labels < 2
    return [*others, TensorBatches(last.inputs[held], last.labels[held], num_classes=CLASSES)]


def reply(client, sums, counts):
    return Reply(client, 1, 1, 0.1, {}, {PROTOTYPE_SUMS: {SUMS: sums, COUNTS: counts}})


def test_fedproto_by_hand():
    """((1 + 25) / 2 + 0) / 2: squares over the dimensions, then over the batch."""
    features = torch.tensor([[1.0, 5.0], [7.0, 7.0]], requires_grad=True)
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 0.0]])  # the second has none
    found = prototype_distance(features, prototypes)
    found.backward()
    assert found.item() == pytest.approx(6.5)
    assert features.grad.tolist() == [[-0.5, 2.5], [0.0, 0.0]]


@pytest.mark.slow
def test_prototypes_are_the_means_over_all_examples_and_travel_alone():
    """An array is its data and 128 bytes of header; round 1 has nothing to send down."""
    strategy, kept = built(FedProto, local_lr=0.1), stores(3)
    _, reports = train(strategy, 2, Classifier, datasets(), personal="all", stores=kept)
    models = [store.load(strategy.state.experiment, 2)["personal"] for store in kept.values()]
    means, counts = 128 + 4 * CLASSES * SIZE, 128 + 4 * CLASSES
    assert [report.bytes_down for report in reports[1:]] == [0, 3 * means]
    assert [report.bytes_up for report in reports[1:]] == [3 * (means + counts)] * 2
    features = []
    for state, data in zip(models, datasets(), strict=True):
        model = Classifier().eval()
        model.load_state_dict(state)
        features.append(model(data.inputs)[0].detach())
    features, labels = torch.cat(features), torch.cat([data.labels for data in datasets()])
    found = strategy.server_sides["fedproto"].broadcast(0)[PROTOTYPES][MEANS]
    for c in range(CLASSES - 1):
        torch.testing.assert_close(found[c], features[labels == c].mean(0))
    assert found.shape == (CLASSES, SIZE)
    assert found[-1].abs().max() == 0.0


def test_a_class_that_nobody_in_the_round_holds_keeps_its_prototype():
    server = PrototypeServer()
    server.init({})
    server.init({})
    first = torch.tensor([[2.0, 4.0], [3.0, 3.0], [0.0, 0.0]])
    server.reduce(total_of([reply(0, first, torch.tensor([2.0, 1.0, 0.0]))]), {}, COHORT)
    assert server.prototypes[MEANS].tolist() == [[1.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    second = torch.tensor([[8.0, 8.0], [0.0, 0.0], [0.0, 0.0]])
    server.reduce(total_of([reply(1, second, torch.tensor([2.0, 0.0, 0.0]))]), {}, COHORT)
    assert server.prototypes[MEANS].tolist() == [[4.0, 4.0], [3.0, 3.0], [0.0, 0.0]]


def test_features_of_another_size_are_refused_by_name():
    """In round 1 those that are not most clients'; then the shapes are known."""
    server, counts = PrototypeServer(), torch.ones(2)
    server.init({})
    assert server.expected() == {PROTOTYPE_SUMS: {SUMS: (None, None), COUNTS: (None,)}}
    three, four = (torch.ones(2, size) for size in (3, 4))
    replies = [reply(3, three, counts), reply(5, four, counts), reply(7, three, counts)]

    fold = ReplyFold(
        FoldSettings(Expected({}, {}), Weights("clients"), {PROTOTYPE_SUMS}, keep=True)
    )
    fold.in_full = replies
    fold.refuse_misfits()
    assert fold.refused.keys() == {5}
    assert "'sums': (2, 4)" in fold.refused[5]
    assert "task.model" in fold.refused[5]
    assert [one.client_id for one in fold.replies] == [3, 7]
    with refused("2", "3", "9", kind=RefusedReplyError):
        server.check(reply(8, three, torch.ones(9)))
    server.reduce(total_of([reply(3, three, counts)]), {}, COHORT)
    assert server.expected() == {PROTOTYPE_SUMS: {SUMS: (2, 3), COUNTS: (2,)}}
