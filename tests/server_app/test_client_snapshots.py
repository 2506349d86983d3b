"""The stored replies of the last round, runs that reuse them, and tasks without accuracy."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fedhet.common.results import read_rows
from fedhet.strategies.base import Cohort, Reply
from fedhet.strategies.components.local_training import steps_by_tensor
from fedhet.strategies.components.local_training_config import LocalTrainingConfig, Phase
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.round.client_snapshots import FILE, ClientSnapshots, load_replies
from tests.recipes import TINY, run_recipe
from tests.refused import refused
from tests.strategies.sides import total_of

pytestmark = pytest.mark.slow

CVAE = ["task.model=cvae", "task.mean=[0.0]", "task.std=[1.0]", "local.lr=0.01", "rounds=1"]


def replies_of(params):
    for client in (2, 10):
        update = {name: torch.randn(x.shape) for name, x in params.items()}
        sums = {"body.weight": torch.full((2,), float(client)), "z": torch.ones(())}
        yield Reply(client, 10 + client, 3, 0.3, update, {"sums": sums})


def test_the_replies_of_the_last_round_are_read_as_they_were_written(tmp_path):
    names = ("body.weight", "body.10.weight", "body.2.weight", "body.2.bias")
    params = {name: torch.randn(3, 2) for name in names}
    sent, path = list(replies_of(params)), tmp_path / "run" / FILE
    for replies in ([replace(sent[0], client_id=99), *sent[1:]], sent):
        ClientSnapshots(path)(params, total_of(sent), replies, Cohort(1, 2, 2))
    received, found = load_replies(path)
    torch.testing.assert_close(received, params)
    assert list(received) == list(params)  # the order of the layers
    for one, other in zip(sent, found, strict=True):
        for key in ("client_id", "num_examples", "num_steps", "lr_sum"):
            assert getattr(other, key) == getattr(one, key)
        torch.testing.assert_close(dict(other.update), dict(one.update))
        torch.testing.assert_close(other.payloads, one.payloads)
        model = load_file(path)[f"{one.client_id}/model/body.weight"]
        assert torch.equal(model, params["body.weight"] + one.update["body.weight"])


def test_a_task_without_accuracy_reports_its_loss(tmp_path):
    words = [*TINY, *CVAE, "strategy=maecho", "evaluation.model=both", "local.optimizer=adam"]
    words += ["local.momentum=0", "evaluation.clients=true", "local.epochs=3"]
    summary = run_recipe(tmp_path, *words)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert not any("accuracy" in name for row in rows for name in row)
    assert {"received_loss", "personal_test_loss", "client_loss"} <= set(rows[1])
    assert summary["loss"] == rows[1]["loss"] < 0.8 * rows[0]["loss"]
    assert (summary["accuracy"], summary["best_accuracy"]) == (None, None)
    assert not (tmp_path / FILE).exists()


def test_personal_tensors_are_neither_sent_nor_fused(tmp_path):
    words = [*TINY, *CVAE, "strategy=maecho", "strategy.personal=encoder.*", "local.momentum=0"]
    words += ["evaluation.model=clients", "evaluation.clients=true", "local.epochs=1"]
    run_recipe(tmp_path, *words, "checkpoint.client_models=true")
    params, replies = load_replies(tmp_path / FILE)
    assert {name.partition(".")[0] for name in params} == {"decoder"}
    for reply in replies:
        sent = set(reply.payloads["projections"])
        assert sent == {"decoder.0.weight", "decoder.2.weight", "decoder.4.weight"}
    assert set(load_file(tmp_path / "model.safetensors")) == set(params)
    assert read_rows(tmp_path / "metrics.jsonl")[1]["client_loss"] > 0


ONE = [*TINY, "rounds=1", "local.epochs=1", "local.momentum=0.5", "local.initial=own"]
TRAINED = [*ONE, "strategy=ensemble"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_recipe(folder, *TRAINED, "checkpoint.client_models=true")
    return folder


@pytest.mark.parametrize(
    "words", [["strategy=maecho"], ["strategy=average", "attack=sign_flip", "attack.allow=true"]]
)
def test_nothing_is_trained_and_the_result_is_the_same(words, trained, tmp_path, monkeypatch):
    words = [*ONE, *words]
    plain = run_recipe(tmp_path / "plain", *words)
    monkeypatch.delattr("fedhet.client_app.client.train_locally")
    again = run_recipe(tmp_path / "again", *words, f"local.reuse_training={trained}")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "again"))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert plain["accuracy"] == pytest.approx(again["accuracy"], abs=0.003)


def test_reused_training_has_moved_as_far_as_it_did_with_its_momentum(tmp_path, monkeypatch):
    """FedNova divides by |a_i|, which of K steps with momentum is not K, and in phases less."""
    words = [*TINY, "rounds=1", "local.epochs=3", "local.momentum=0.9"]
    words += ["strategy=fednova"]
    run_recipe(tmp_path / "plain", *words, "checkpoint.client_models=true")
    monkeypatch.delattr("fedhet.client_app.client.train_locally")
    run_recipe(tmp_path / "again", *words, f"local.reuse_training={tmp_path / 'plain'}")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "again"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    phases = [Phase(TensorSelector("last:1"), 1), Phase(TensorSelector("all"))]
    options = LocalTrainingConfig(epochs=3, phases=phases)
    assert steps_by_tensor(options, ["body", "head"], 30) == {"body": 20, "head": 30}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["seed=1"], ["seed=0"]),
        (["local.epochs=2"], ["local.epochs=1"]),
        (["partition.alpha=3.0"], ["3.0"]),
        (["strategy=[ensemble,fedprox]"], ["strategy.fedprox.mu"]),
        (["strategy=[ensemble,ditto]"], ["ditto"]),
        (["rounds=2"], ["rounds=1"]),
        (["local.reuse_training=/no/run"], ["checkpoint.client_models=true"]),
    ],
)
def test_a_run_that_trained_differently_is_refused(words, named, trained, tmp_path):
    with refused(*named):
        run_recipe(tmp_path, *TRAINED, f"local.reuse_training={trained}", *words)
