"""Scores of the clients' own models by a direct count; fine-tuning leaves nothing behind."""

import math

import pytest
import torch
from flwr.app import Message, RecordDict
from torch import nn
from torch.nn import functional as F

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.state import ContextStateStore
from fedhet.common.results import read_rows
from fedhet.server_app.checkpoint import checkpoints, load_checkpoint
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.fedbabu import FedBABU
from fedhet.tasks.metrics import MetricSet, Predictions
from tests.federation import Regression, TensorBatches, client_of, half_squared_error
from tests.recipes import TINY, run_recipe
from tests.strategies.labelled import Classifier, WithoutDropout, assert_same, blobs
from tests.strategies.sides import per_fedavg
from tests.strategies.test_phases import phases_of

CONFIG = {"round": 1, "lr": 0.1, "evaluate-trained": True}


def examples(size: int, classes: int = 3, seed: int = 9) -> TensorBatches:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (size,), generator=generator)
    inputs = torch.randn(size, 4, generator=generator) + F.one_hot(labels, 4)
    return TensorBatches(inputs, labels, num_classes=3)


def client(model: nn.Module, data: TensorBatches | None = None, **how) -> FederatedClient:
    how.setdefault("options", LocalTrainingConfig(batch_size=8, epochs=2))
    return client_of(model, data or blobs(1)[0], F.cross_entropy, **how)


def scores_of(**how) -> tuple[dict, nn.Module]:
    model = Classifier()
    one = client(model, **how)
    metrics = one.fit(one.get_parameters({}), dict(CONFIG))[2]
    return {k: v for k, v in metrics.items() if k.startswith("personal")}, model.eval()


def hits(model: nn.Module, data: TensorBatches, label: int | None = None) -> list[bool]:
    with torch.no_grad():
        guesses = model(data.inputs)[1].argmax(1).tolist()
    pairs = zip(guesses, data.labels.tolist(), strict=True)
    return [guess == y for guess, y in pairs if label in (None, y)]


@pytest.mark.parametrize("personal", ["none", "head.*"])
def test_scores_by_a_direct_count(personal):
    held_out, test = examples(40, seed=1), examples(600)  # more than one batch of the evaluation
    kept = TensorSelector(personal)
    scores, model = scores_of(held_out=held_out, test_data=test, personal=kept)
    with torch.no_grad():
        loss = F.cross_entropy(model(test.inputs)[1], test.labels)
    assert scores == {
        "personal-accuracy": pytest.approx(sum(hits(model, held_out)) / 40),
        "personal-test-accuracy": pytest.approx(sum(hits(model, test)) / 600),
        "personal-test-loss": pytest.approx(float(loss), rel=1e-5),
    }
    assert not torch.equal(model.head.weight, Classifier().head.weight)
    assert scores_of(held_out=held_out)[0].keys() == {"personal-accuracy"}
    assert scores_of()[0] == {}


@pytest.mark.parametrize("classes", [3, 2])
def test_with_the_classes_weighted_as_the_clients_own(classes):
    """Brute force: for every training example, all test examples of its class vote, if any."""
    test = examples(60, classes)
    scores, model = scores_of(test_data=test)
    right = {label: hits(model, test, label) for label in range(classes)}
    held = [label for label in blobs(1)[0].labels.tolist() if label < classes]
    votes = [sum(right[label]) / len(right[label]) for label in held]
    assert scores["personal-accuracy"] == pytest.approx(sum(votes) / len(votes))
    assert scores["personal-accuracy"] != pytest.approx(scores["personal-test-accuracy"])

    # without any class of the client's own; a NaN would have the whole reply refused
    others = TensorBatches(torch.ones(8, 4), torch.full((8,), 2), num_classes=3)
    scores, _ = scores_of(test_data=examples(60, classes=2), data=others)
    assert scores.keys() == {"personal-test-accuracy", "personal-test-loss"}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        return inputs, self.head(inputs).transpose(1, 2)


def test_examples_of_several_labels_have_the_share_that_is_right_and_no_class():
    def texts(size: int) -> TensorBatches:
        one = examples(5 * size)
        return TensorBatches(one.inputs.view(size, 5, 4), one.labels.view(size, 5), num_classes=3)

    test, model = texts(30), Tokens()
    with torch.no_grad():
        _, logits = model(test.inputs)
    expected = (logits.argmax(1) == test.labels).float().mean()
    one = client(model, texts(20), test_data=test)
    scores = one._evaluate_own()
    assert scores == {
        "personal-test-accuracy": pytest.approx(float(expected)),
        "personal-test-loss": pytest.approx(float(F.cross_entropy(logits, test.labels)), rel=1e-5),
    }


@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_fine_tuning_helps_at_the_client_and_trains_all_tensors(optimizer):
    body_alone = LocalTrainingConfig(batch_size=8, epochs=2, phases=phases_of(FedBABU))
    start, scores = Classifier().state_dict(), []
    for config in ({}, {"finetune-epochs": 0}, {"finetune-epochs": 30}):
        one = client(Classifier(), optimizer=optimizer(), options=body_alone)
        config |= {"round": 3, "lr": 0.1}
        scores.append(one.evaluate(one.get_parameters({}), config)[2]["accuracy"])
        for name, value in one.shared.model.named_parameters():
            assert torch.equal(value, start[name]) == (config.get("finetune-epochs") != 30)
    expected = sum(hits(Classifier().eval(), blobs(1)[0])) / 17
    assert scores[0] == scores[1] == pytest.approx(expected)
    assert scores[2] > expected + 0.2


def test_per_fedavg_is_scored_after_plain_steps_of_alpha():
    """F(w) = f(w - alpha grad f(w)): one step on all of 17 examples, which are one mini-batch."""
    data, found, alpha = blobs(1)[0], WithoutDropout(), 0.7
    loss = F.cross_entropy(found(data.inputs)[1], data.labels)
    slopes = torch.autograd.grad(loss, list(found.parameters()))
    expected = [p - alpha * slope for p, slope in zip(found.parameters(), slopes, strict=True)]
    options = LocalTrainingConfig(batch_size=17, epochs=1)
    one = client(WithoutDropout(), optimizer=per_fedavg(alpha), options=options)
    one.evaluate(one.get_parameters({}), {"round": 1, "lr": 0.1, "finetune-epochs": 1})
    torch.testing.assert_close(list(one.shared.model.parameters()), expected)


@pytest.mark.parametrize("trained", [True, False])
def test_fine_tuning_leaves_the_state_and_the_next_round_alone(trained):
    stores = [ContextStateStore(RecordDict()) for _ in range(2)]
    head = TensorSelector("head.*")
    both = one, _ = [client(Classifier(), store=store, personal=head) for store in stores]
    x, config = one.get_parameters({}), {**CONFIG, "experiment": "run"}
    if trained:
        for each in both:
            each.fit(x, dict(config))
        config |= {"round": 2, "state-round": 1}
    one.evaluate(x, {**config, "finetune-epochs": 5})
    assert_same(*(store.load("run", 1).get("personal", {}) for store in stores))
    left, right = (each.fit(x, dict(config))[0] for each in both)
    assert all((a == b).all() for a, b in zip(left, right, strict=True))


def run(folder, *words, **how) -> tuple[dict, list[dict]]:
    words = (*TINY, "local.epochs=1", "task.train_size=300", "task.test_size=100", *words)
    return run_recipe(folder, *words, **how), read_rows(folder / "metrics.jsonl")


HALF = ["strategy=fedper", "participation=0.67"]  # two of three clients a round
SHOWN = {"personal-test-accuracy": "accuracy", "personal-test-loss": "loss"}
SHOWN |= {"personal-accuracy": "personal_accuracy"}
NAMES = [f"body.{layer}.weight" for layer in (1, 3, 5)]  # what travels


@pytest.mark.slow
def test_the_mean_is_over_all_clients_that_have_trained_so_far_also_after_a_resume(tmp_path):
    replies: list[dict] = []

    def listen(reply: Message) -> Message:
        found = dict(reply.content.metric_records.get("metrics", {}))
        if "personal-test-accuracy" in found:
            replies.append(found)
        return reply

    run(tmp_path, *HALF, "rounds=2", tamper=listen)
    _, rows = run(tmp_path, *HALF, "rounds=3", "resume=true", tamper=listen)
    last: dict[int, dict] = {}
    for number, row in enumerate(rows[1:]):
        now = {int(reply["partition-id"]): reply for reply in replies[2 * number : 2 * number + 2]}
        assert sorted(now) == row["clients"]
        last |= now
        for name, shown in SHOWN.items():
            mean = sum(reply[name] for reply in last.values()) / len(last)
            assert row[shown] == pytest.approx(mean), shown
    assert len(last) == 3 > len(rows[-1]["clients"])
    kept = load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1], NAMES).state.personal
    assert kept == {
        client_id: {name: value for name, value in reply.items() if name.startswith("personal")}
        for client_id, reply in last.items()
    }


def test_a_regressions_own_model_has_its_metrics_on_the_test_set():
    inputs = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)).double()
    data = TensorBatches(inputs, inputs.sum(1))
    metrics = MetricSet(["mae"], Predictions("regression"))
    model = Regression(2)
    model.classifies = False
    one = client_of(model, data, half_squared_error, test_data=data, metrics=metrics)
    _, _, scores = one.fit(one.get_parameters({}), dict(CONFIG))
    with torch.no_grad():
        errors = one.shared.model(inputs)[1].squeeze(1) - data.labels
    expected = {"loss": float(errors.square().mean()) / 2, "mae": float(errors.abs().mean())}
    for name, value in expected.items():
        assert scores[f"personal-test-{name}"] == pytest.approx(value, rel=1e-6)


@pytest.mark.slow
def test_fine_tuning_and_scores_of_both_models_change_nothing_but_their_own_figures(tmp_path):
    words = ["strategy=fedbabu", "evaluation.clients=true"]
    plain, before = run(tmp_path / "plain", *words)
    more = ("evaluation.finetune_epochs=5", "evaluation.model=both")
    tuned, after = run(tmp_path / "tuned", *words, *more)
    assert tuned["parameters_sha256"] == plain["parameters_sha256"]
    for name in ("accuracy", "train_loss"):
        assert after[-1][name] == before[-1][name]
    assert after[-1]["accuracy"] != after[-1]["personal_test_accuracy"]
    assert not [name for name in before[-1] if name.startswith("personal")]
    assert after[-1]["client_accuracy"] > before[-1]["client_accuracy"] + 0.1
    assert math.isfinite(after[-1]["client_loss"])
