"""The stored replies of the last round; and tasks without accuracy."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from common.results import read_rows
from strategies.base import Reply
from strategies.round.client_snapshots import FILE, ClientSnapshots, load_replies
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

CVAE = ["task.model=cvae", "task.mean=[0.0]", "task.std=[1.0]", "local.lr=0.01", "rounds=1"]


def replies_of(params):
    replies = []
    for client in (2, 10):
        update = {name: torch.randn(x.shape) for name, x in params.items()}
        sums = {"body.weight": torch.full((2,), float(client)), "z": torch.ones(())}
        replies.append(Reply(client, 10 + client, 3, 0.3, update, {"sums": sums}))
    return replies


def test_the_replies_of_the_last_round_are_read_as_they_were_written(tmp_path):
    names = ("body.weight", "body.10.weight", "body.2.weight", "body.2.bias")
    params = {name: torch.randn(3, 2) for name in names}
    sent, path = replies_of(params), tmp_path / "run" / FILE
    ClientSnapshots(path)(params, [replace(sent[0], client_id=99), *sent[1:]])
    assert ClientSnapshots(path)(params, sent) is sent
    received, found = load_replies(path)
    torch.testing.assert_close(received, params)
    assert list(received) == list(params)  # the order of the layers
    assert [reply.client_id for reply in found] == [2, 10]
    for one, other in zip(sent, found, strict=True):
        counts = ("num_examples", "num_steps", "lr_sum")
        assert [getattr(one, key) for key in counts] == [getattr(other, key) for key in counts]
        torch.testing.assert_close(dict(other.update), dict(one.update))
        torch.testing.assert_close(other.payloads, one.payloads)
        model = load_file(path)[f"{one.client_id}/model/body.weight"]
        assert torch.equal(model, params["body.weight"] + one.update["body.weight"])


@pytest.mark.parametrize("strategy", ["fedavg", "maecho"])
def test_a_task_without_accuracy_reports_its_loss(strategy, tmp_path):
    words = [*TINY, *CVAE, f"strategy={strategy}", "evaluation.model=both", "local.optimizer=adam"]
    words += ["local.momentum=0", "evaluation.clients=true", "local.epochs=3"]
    summary = run_recipe(tmp_path, *words)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert not any("accuracy" in name for row in rows for name in row)
    assert {"received_loss", "personal_test_loss", "client_loss"} <= set(rows[1])
    assert summary["loss"] == rows[1]["loss"] < 0.8 * rows[0]["loss"]
    assert (summary["accuracy"], summary["best_accuracy"]) == (None, None)
    assert not (tmp_path / FILE).exists()


def test_personal_tensors_are_neither_sent_nor_fused(tmp_path):
    """MA-Echo's Figure 4: decoders are fused, encoders stay with their clients."""
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
