"""Ensemble: mean logits by hand and by brute force, and that a run gives out the ensemble."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from common.errors import ConfigError
from common.results import read_rows
from conf import compose, plain_part
from strategies.base import RefusedReplyError, Reply
from strategies.ensemble import AllClients, Ensemble, ensemble_of, mean_logits
from strategies.round.records import to_tensors
from strategies.round.server_model import ServerModel
from strategies.statistics.class_counts import (
    CLASS_COUNTS,
    COUNTS,
    ClassCountsServer,
    holder_shares,
)
from tasks import Task, build_task
from tasks.evaluation import evaluate_model
from tests.recipes import TINY, overrides, run_recipe


class Layers(nn.Module):
    """Two inputs, a normalised hidden layer, three classes with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        """Return (features, logits)."""
        features = self.body(inputs)
        return features, self.head(features)


class Head(nn.Module):
    """A head alone: its logits are its inputs times its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, inputs):
        return inputs, self.head(inputs)


def reply(client: int, update: dict, counts: list[float], buffers: dict | None = None) -> Reply:
    payloads = {CLASS_COUNTS: {COUNTS: torch.tensor(counts)}}
    return Reply(client, int(sum(counts)), 1, 0.1, update, payloads, buffers=buffers or {})


def heads() -> list[Reply]:
    """Three clients: the first holds classes 0 and 1, the second 1, the third only one example."""
    logits = ([1.0, 2.0, 30.0], [40.0, 4.0, 50.0], [60.0, 70.0, 80.0])
    counts = ([5.0, 2.0, 0.0], [1.0, 9.0, 0.0], [0.0, 1.0, 0.0])
    return [
        reply(client, {"head.weight": torch.tensor(own)[:, None]}, held)
        for client, (own, held) in enumerate(zip(logits, counts, strict=True))
    ]


@pytest.mark.parametrize(
    ("masked", "wanted"),
    [(True, [1.0, 3.0, 0.0]), (False, [101 / 3, 76 / 3, 160 / 3])],
    ids=["masked", "plain"],
)
def test_logits_by_hand(masked, wanted):
    """Masked: 1, (2 + 4) / 2, 0. Plain: (1 + 40 + 60) / 3 and so on."""
    shares = [[1.0, 0.5, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]  # one example is not enough
    assert holder_shares(heads()).tolist() == shares
    network = ServerModel(Head(), (1,), 3)
    features, logits = mean_logits(network, heads(), masked=masked)(torch.tensor([[1.0], [2.0]]))
    torch.testing.assert_close(logits, torch.tensor([wanted, [2 * value for value in wanted]]))
    assert features.shape == (2, 3, 1)


def trained(count: int = 3) -> tuple[ServerModel, list[Reply], list[nn.Module]]:
    """Return x, replies and the clients' models themselves, BatchNorm statistics and all."""
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
    torch.testing.assert_close(mean_logits(network, replies, masked=False)(INPUTS)[1], wanted)
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
    with pytest.raises(RefusedReplyError, match="of 1 classes, not 3"):
        side.check(reply(0, {}, [1.0]))
    with pytest.raises(RefusedReplyError, match="below 0"):
        side.check(reply(0, {}, [4.0, -1.0, 0.0]))
    short = Reply(0, 5, 1, 0.1, {}, {CLASS_COUNTS: {COUNTS: torch.tensor([1.0, 1.0, 1.0])}})
    with pytest.raises(RefusedReplyError, match="sum to 3, and it has 5 examples"):
        side.check(short)
    with pytest.raises(ConfigError, match="weight stays at the clients"):
        ClassCountsServer().init({"body.weight": torch.zeros(1)})


def test_networks_without_logits_and_replies_without_class_counts_are_refused():
    network, replies, _ = trained()
    bare = [replace(answer, payloads={}) for answer in replies]
    mean_logits(network, bare, masked=False)
    with pytest.raises(ConfigError, match="needs the clients' class counts"):
        mean_logits(network, bare, masked=True)
    network.model.classifies = False
    with pytest.raises(ConfigError, match="strategy=ensemble averages logits, and Layers has none"):
        AllClients().bind(network)


def task_of(*words: str) -> Task:
    recipe = compose(overrides(*words))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    return build_task(*parts, seed=0, num_clients=3)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
def test_a_run_evaluates_and_stores_the_ensemble(masked, tmp_path):
    """The same from the clients' messages, model by model, and from model.safetensors."""
    sent: list = []

    def listen(message):
        if message.has_content() and "update" in message.content.array_records:
            records = message.content.array_records
            sent.append((to_tensors(records["update"]), records.get(CLASS_COUNTS)))
        return message

    words = [*TINY, "strategy=ensemble", "rounds=1"]
    words += [f"strategy.ensemble.masked={str(masked).lower()}"]
    summary = run_recipe(tmp_path, *words, tamper=listen)
    task = task_of(*words)
    x, test = task.build_model(0).state_dict(), task.test_data(torch.device("cpu"))
    model = task.build_model(3)
    inputs, labels = next(test.batches(len(test), generator=None, train=False))
    total, holders = 0.0, 0.0
    for update, counts in sent:
        model.load_state_dict({name: x[name] + change for name, change in update.items()})
        held = to_tensors(counts)[COUNTS] > 1 if masked else torch.ones(10)
        total = total + model(inputs)[1].detach() * held
        holders = holders + held
        assert (counts is None) != masked
    logits = total / holders
    accuracy = float((logits.argmax(1) == labels).float().mean())
    assert summary["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert summary["loss"] == pytest.approx(float(task.loss(logits, labels)), rel=1e-5)
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["accuracy"] == summary["accuracy"]
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == 1 + 3 * len(x)
    found = evaluate_model(ensemble_of(stored, task.build_model(8)), test, task.loss)
    assert found == pytest.approx((summary["loss"], summary["accuracy"]), rel=1e-5)


def test_the_flower_strategy_sends_class_counts_only_if_masked():
    with pytest.raises(ConfigError, match="output AllClients runs the model"):
        Ensemble()
    for masked, sends in ((True, {CLASS_COUNTS}), (False, set())):
        strategy = Ensemble(masked, server_model=ServerModel(Layers(), (2,), 3))
        assert strategy.client_sides["class_counts"].sends == sends
        assert strategy.server_step.output.masked == masked
