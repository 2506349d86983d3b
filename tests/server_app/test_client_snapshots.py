"""What clients sent, kept beside the run; and a run that has no accuracy."""

import json

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
    generator = torch.Generator().manual_seed(0)
    return [
        Reply(
            client,
            num_examples=10 + client,
            num_steps=3,
            lr_sum=0.3,
            update={n: torch.randn(x.shape, generator=generator) for n, x in params.items()},
            payloads={
                "sums": {"body.weight": torch.full((2,), float(client)), "z": torch.ones(())}
            },
        )
        for client in (2, 10)
    ]


def test_replies_come_back_as_they_went(tmp_path):
    names = ("body.weight", "body.10.weight", "body.2.weight", "body.2.bias")
    params = {name: torch.randn(3, 2) for name in names}
    sent = replies_of(params)
    assert ClientSnapshots(tmp_path / "run" / FILE)(params, sent) is sent
    received, found = load_replies(tmp_path / "run" / FILE)
    torch.testing.assert_close(received, params)
    assert list(received) == list(params)  # chains of layers are read off it
    for one, other in zip(sent, found, strict=True):
        counts = ("client_id", "num_examples", "num_steps", "lr_sum")
        assert [getattr(one, key) for key in counts] == [getattr(other, key) for key in counts]
        torch.testing.assert_close(dict(other.update), dict(one.update))
        torch.testing.assert_close(other.payloads, one.payloads)


def test_the_models_are_the_clients_and_the_last_round_stays(tmp_path):
    params = {"body.weight": torch.randn(3, 2)}
    keep, sent = ClientSnapshots(tmp_path / FILE), replies_of(params)
    keep(params, sent)
    keep({"body.weight": torch.zeros(3, 2)}, sent[1:])
    tensors = load_file(tmp_path / FILE)
    assert not any(key.startswith("2/") for key in tensors)
    assert torch.equal(tensors["10/model/body.weight"], sent[1].update["body.weight"])


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_keeps_them_only_if_it_is_told_to(kept, tmp_path):
    words = ["strategy=maecho"] if kept else []
    words += ["local.epochs=1", "rounds=1", f"checkpoint.client_models={str(kept).lower()}"]
    run_recipe(tmp_path, *TINY, *words)
    assert (tmp_path / FILE).exists() == kept
    if kept:
        _, replies = load_replies(tmp_path / FILE)
        assert [reply.client_id for reply in replies] == [0, 1, 2]
        assert set(replies[0].payloads) == {"class_counts", "projection_scales", "projections"}


@pytest.mark.parametrize("strategy", ["fedavg", "maecho", "regmean"])
def test_a_task_without_accuracy_reports_its_loss_and_no_accuracy(strategy, tmp_path):
    words = [*TINY, *CVAE, f"strategy={strategy}", "evaluation.model=both", "local.optimizer=adam"]
    words += ["local.momentum=0", "evaluation.clients=true", "local.epochs=3"]
    summary = run_recipe(tmp_path, *words)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert not any("accuracy" in name for row in rows for name in row)
    assert {"received_loss", "personal_test_loss", "client_loss"} <= set(rows[1])
    assert summary["loss"] == rows[1]["loss"] < 0.8 * rows[0]["loss"]
    assert summary["accuracy"] is None
    assert summary["best_accuracy"] is None
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"


def test_what_is_personal_is_neither_sent_nor_fused(tmp_path):
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
