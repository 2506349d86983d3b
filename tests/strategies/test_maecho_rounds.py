"""MA-Echo through both apps: bad projections, several rounds, and methods beside it."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from strategies.base import Reply, Tensors
from strategies.maecho import HarmonizedOptima
from strategies.round.client_snapshots import FILE, load_replies
from strategies.round.records import to_record, to_tensors
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

LAYER = "body.3.weight"
WORDS = [*TINY, "local.epochs=1", "checkpoint.client_models=true", "evaluation.every=0"]
LOW_RANK = "strategy.projections.rank=10"


def fused(folder) -> Tensors:
    return load_file(folder / "model.safetensors")


def kept(folder) -> tuple[dict, list[Reply]]:
    """x of the last round, and the replies that were fused."""
    return load_replies(folder / FILE)


# ---- bad projections -----------------------------------------------------------------------------


def narrow(projection: torch.Tensor) -> torch.Tensor:
    return projection[:, :-1]


def lopsided(projection: torch.Tensor) -> torch.Tensor:
    return projection + torch.eye(len(projection)).roll(1, 0)


def negative(projection: torch.Tensor) -> torch.Tensor:
    return projection - 0.5 * torch.eye(len(projection))


def unknown(projection: torch.Tensor) -> torch.Tensor:
    return torch.full_like(projection, torch.nan)


def test_a_bad_projection_is_refused_by_name_and_the_others_are_fused(tmp_path, caplog):
    """Clients 0 to 3 send such as are none, 4 and 5 true ones."""
    wrongs = [narrow, lopsided, negative, unknown]

    def tamper(reply: Message) -> Message:
        if reply.has_content() and "projections" in reply.content.array_records:
            client = reply.content.metric_records["metrics"]["partition-id"]
            if client < len(wrongs):
                sent = to_tensors(reply.content["projections"])
                sent[LAYER] = wrongs[client](sent[LAYER])
                reply.content["projections"] = to_record(sent)
        return reply

    words = [*WORDS, "clients=6", "rounds=1", "strategy=maecho", "strategy.projections.dense=true"]
    summary = run_recipe(tmp_path, *words, clients=6, tamper=tamper)
    assert (summary["status"], summary["failures"]) == ("completed", 4)
    said = [r.getMessage() for r in caplog.records if "round 1: client" in r.getMessage()]
    reasons = [
        *("(400, 399), expected (400, 400)", "not symmetric"),
        *("below 0", "NaN"),
    ]
    for client, reason in enumerate(reasons):
        (line,) = [line for line in said if f"client {client}:" in line]
        assert LAYER in line
        assert reason in line
    x, replies = kept(tmp_path)
    assert [reply.client_id for reply in replies] == [4, 5]
    expected = HarmonizedOptima(dense=True, device="cpu")(x, replies)
    for name, value in fused(tmp_path).items():
        torch.testing.assert_close(value, x[name] + expected[name], atol=1e-5, rtol=1e-5)


# ---- rounds --------------------------------------------------------------------------------------


def test_each_round_starts_from_the_last_one_s_fusion(tmp_path):
    run_recipe(tmp_path / "one", *WORDS, LOW_RANK, "strategy=maecho", "rounds=1")
    run_recipe(tmp_path / "two", *WORDS, LOW_RANK, "strategy=maecho", "rounds=2")
    x, replies = kept(tmp_path / "two")
    first = fused(tmp_path / "one")
    for name, value in x.items():
        torch.testing.assert_close(value, first[name], atol=0, rtol=0)
    expected = HarmonizedOptima(device="cpu")(x, replies)
    for name, value in fused(tmp_path / "two").items():
        torch.testing.assert_close(value, x[name] + expected[name], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two rounds of MA-Echo, of a classifier without bias."""
    folder = tmp_path_factory.mktemp("maecho") / "run"
    run_recipe(folder, *WORDS, LOW_RANK, "strategy=maecho", "task.head_bias=false")
    return folder


BESIDE = [
    ("fedprox", "strategy.fedprox.mu"),
    ("feddw", "strategy.feddw.mu"),
]


@pytest.mark.flower  # a run each
@pytest.mark.parametrize(("method", "key"), BESIDE)
def test_a_method_of_weight_zero_beside_it_changes_nothing(method, key, alone, tmp_path):
    words = [LOW_RANK, f"strategy=[maecho,{method}]", f"{key}=0", "task.head_bias=false"]
    run_recipe(tmp_path, *WORDS, *words)
    expected = fused(alone)
    for name, value in fused(tmp_path).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.flower  # a run each
@pytest.mark.parametrize(("method", "key"), BESIDE)
def test_a_method_beside_it_does_its_part_and_the_fusion_its_own(method, key, alone, tmp_path):
    """FedProx keeps local models near x; FedDW's clients send soft labels beside projections."""
    words = [LOW_RANK, f"strategy=[maecho,{method}]", f"{key}=10", "task.head_bias=false"]
    run_recipe(tmp_path, *WORDS, "local.lr=0.05", *words)
    x, replies = kept(tmp_path)
    assert not torch.equal(fused(tmp_path)["head.weight"], fused(alone)["head.weight"])
    expected = HarmonizedOptima(device="cpu")(x, replies)
    for name, value in fused(tmp_path).items():
        torch.testing.assert_close(value, x[name] + expected[name], atol=1e-5, rtol=1e-5)
    if method == "fedprox":
        _, free = kept(alone)
        assert _length(replies) < 0.5 * _length(free)
    else:
        assert all({"projections", "soft_label_sums"} <= set(r.payloads) for r in replies)


def _length(replies: list[Reply]) -> float:
    return sum(float(value.norm()) for reply in replies for value in reply.update.values())
