"""Ensemble: mean logits by brute force."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedhet.strategies.base import RefusedReplyError, Reply
from fedhet.strategies.ensemble import AllClients, ensemble_of, mean_logits
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import CLASS_COUNTS, COUNTS, ClassCountsServer
from tests.refused import refused


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        features = self.body(inputs)
        return features, self.head(features)


def reply(client: int, update: dict, counts: list[float], buffers: dict | None = None) -> Reply:
    payloads = {CLASS_COUNTS: {COUNTS: torch.tensor(counts)}}
    return Reply(client, int(sum(counts)), 1, 0.1, update, payloads, buffers=buffers or {})


def trained(count: int = 3) -> tuple[ServerModel, list[Reply], list[nn.Module]]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        sent, models = Layers().eval(), [Layers().eval() for _ in range(count)]
        for model in models:
            model.body[1].running_mean.normal_()
            model.body[1].running_var.uniform_(0.5, 2.0)
    x = sent.state_dict()
    counts = ([4.0, 0.0, 3.0], [2.0, 6.0, 1.0], [0.0, 2.0, 2.0])
    own, replies = {name for name, _ in sent.named_buffers()}, []
    for model, held in zip(models, counts, strict=False):
        change = {n: v - x[n] for n, v in model.state_dict().items() if v.is_floating_point()}
        update = {name: value for name, value in change.items() if name not in own}
        buffers = {name: value for name, value in change.items() if name in own}
        replies.append(reply(len(replies), update, held, buffers))
    return ServerModel(sent, (2,), 3), replies, models


INPUTS = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [1, 3])
def test_plain_is_the_mean_of_logits_and_masked_of_zeroed_rows_over_the_holders(count):
    """As in MA-Echo's code, in the classifier's rows; each model has its BatchNorm statistics."""
    network, replies, models = trained(count)
    before = {name: value.clone() for name, value in network.model.state_dict().items()}
    wanted = torch.stack([model(INPUTS)[1] for model in models]).mean(0)
    features, logits = mean_logits(network, replies, masked=False)(INPUTS)
    assert features.shape == (6, count, 4)
    torch.testing.assert_close(logits, wanted)
    total, holders = torch.zeros(6, 3), torch.zeros(3)
    for model, answer in zip(models, replies, strict=True):
        unseen = answer.payloads[CLASS_COUNTS][COUNTS] <= 1
        model.head.weight.data[unseen] = 0.0
        model.head.bias.data[unseen] = 0.0
        total += model(INPUTS)[1].detach()
        holders += (~unseen).float()
    logits = mean_logits(network, replies, masked=True)(INPUTS)[1]
    torch.testing.assert_close(logits, total / holders.clamp_min(1))
    after = network.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
def test_the_order_of_clients_does_not_matter(masked):
    """Neither of the replies, nor of the tensors in a file; ids are numbers: 10 comes after 9."""
    network, replies, _ = trained()
    ids = zip((9, 10, 11), replies, strict=True)
    renamed = [replace(answer, client_id=client) for client, answer in ids]
    wanted = mean_logits(network, renamed, masked=masked)(INPUTS)[1]
    turned = mean_logits(network, renamed[::-1], masked=masked)(INPUTS)[1]
    torch.testing.assert_close(turned, wanted)
    output = AllClients(masked)
    output.bind(network)
    output_model = output({}, {}, {}, renamed)
    shuffled = {name: output_model[name] for name in sorted(output_model, reverse=True)}
    assert torch.equal(ensemble_of(shuffled, Layers())(INPUTS)[1], wanted)


def test_counts_that_cannot_be_and_a_personal_classifier_are_refused():
    side = ClassCountsServer()
    side.init({"head.weight": torch.zeros(3, 4)})
    assert side.expected() == {CLASS_COUNTS: {COUNTS: (3,)}}
    side.check(reply(0, {}, [1.0, 0.0, 2.0]))
    with refused("1", "3", kind=RefusedReplyError):
        side.check(reply(0, {}, [1.0]))
    short = Reply(0, 5, 1, 0.1, {}, {CLASS_COUNTS: {COUNTS: torch.tensor([1.0, 1.0, 1.0])}})
    with refused("3", "5", kind=RefusedReplyError):
        side.check(short)
    with refused("clients"):
        ClassCountsServer().init({"body.weight": torch.zeros(1)})


def test_replies_without_class_counts_are_refused():
    network, replies, _ = trained()
    bare = [replace(answer, payloads={}) for answer in replies]
    mean_logits(network, bare, masked=False)
    with refused("clients"):
        mean_logits(network, bare, masked=True)
