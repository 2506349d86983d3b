"""MA-Echo through both apps: bad projections, several rounds, and FedDW beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from strategies.base import Tensors
from strategies.maecho import HarmonizedOptima
from strategies.round.client_snapshots import FILE, load_replies
from strategies.round.records import to_record, to_tensors
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

LAYER = "body.3.weight"
WORDS = [*TINY, "local.epochs=1", "checkpoint.client_models=true", "evaluation.every=0"]
WORDS += ["strategy.projections.rank=10", "task.head_bias=false"]


def fused(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def assert_fusion_of_its_replies(folder: Path) -> list:
    """The stored model is what the aggregator makes of the stored replies; return these."""
    x, replies = load_replies(folder / FILE)
    expected = HarmonizedOptima(device="cpu")(x, replies)
    for name, value in fused(folder).items():
        torch.testing.assert_close(value, x[name] + expected[name], atol=1e-5, rtol=1e-5)
    return replies


def test_a_bad_projection_is_refused_by_name_and_the_others_are_fused(tmp_path, caplog):
    """Clients 0 to 2 send bad projections, 3 and 4 good ones."""
    wrongs = [lambda f: f[:-1], lambda f: 2 * f, lambda f: torch.full_like(f, torch.nan)]

    def tamper(reply: Message) -> Message:
        if reply.has_content() and "projections" in reply.content.array_records:
            client = reply.content.metric_records["metrics"]["partition-id"]
            if client < len(wrongs):
                sent = to_tensors(reply.content["projections"])
                sent[LAYER] = wrongs[client](sent[LAYER])
                reply.content["projections"] = to_record(sent)
        return reply

    words = [*WORDS, "clients=5", "rounds=1", "strategy=maecho"]
    summary = run_recipe(tmp_path, *words, clients=5, tamper=tamper)
    assert (summary["status"], summary["failures"]) == ("completed", 3)
    said = [r.getMessage() for r in caplog.records if "round 1: client" in r.getMessage()]
    for client, reason in enumerate(["(399, 10), expected (400, r)", "above 1", "NaN"]):
        (line,) = [line for line in said if f"client {client}:" in line]
        assert LAYER in line
        assert reason in line
    replies = assert_fusion_of_its_replies(tmp_path)
    assert [reply.client_id for reply in replies] == [3, 4]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of MA-Echo."""
    folder = tmp_path_factory.mktemp("maecho") / "run"
    run_recipe(folder, *WORDS, "strategy=maecho")
    return folder


def test_each_round_starts_from_the_fusion_of_the_last_one(alone, tmp_path):
    run_recipe(tmp_path, *WORDS, "strategy=maecho", "rounds=1")
    x, _ = load_replies(alone / FILE)
    first = fused(tmp_path)
    assert all(torch.equal(value, first[name]) for name, value in x.items())
    assert_fusion_of_its_replies(alone)


def test_feddw_beside_it_regularises_only_with_a_weight_and_the_fusion_is_the_same(alone, tmp_path):
    """Its clients send soft labels beside projections."""
    words = [*WORDS, "strategy=[maecho,feddw]"]
    run_recipe(tmp_path / "zero", *words, "strategy.feddw.mu=0")
    expected = dict(fused(alone))
    torch.testing.assert_close(dict(fused(tmp_path / "zero")), expected, atol=1e-6, rtol=1e-5)
    run_recipe(tmp_path / "ten", *words, "strategy.feddw.mu=10", "local.lr=0.05")
    replies = assert_fusion_of_its_replies(tmp_path / "ten")
    assert not torch.equal(fused(tmp_path / "ten")["head.weight"], expected["head.weight"])
    assert all({"projections", "soft_label_sums"} <= set(reply.payloads) for reply in replies)
