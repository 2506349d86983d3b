"""What a run stores: model.safetensors, checkpoints, the early stop, resuming; who may read it."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedhet.common.results import read_rows, read_summary
from fedhet.conf import compose, plain_part
from fedhet.server_app.checkpoint import checkpoints
from fedhet.strategies.wire.records import METRICS
from fedhet.strategies.wire.tensor_files import below
from fedhet.tasks import build_task
from fedhet.tasks.evaluation import evaluate_model
from tests.recipes import TINY, overrides, run_recipe
from tests.refused import refused

pytestmark = pytest.mark.slow

LAST_TWO = ["strategy=fedavg", "strategy/output=last_two"]
PARTICIPANTS = ["strategy=feddyn", "strategy.feddyn.alpha=0.1", "participation=0.67"]


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


def accuracy_of(tensors: dict[str, torch.Tensor]) -> float | None:
    recipe = compose(overrides(*TINY))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=0, num_clients=3)
    model = task.build_model(5)
    model.load_state_dict(tensors)
    return evaluate_model(model, task.test_data(torch.device("cpu")), task.loss)[1]


@pytest.fixture(scope="module", params=[LAST_TWO, PARTICIPANTS], ids=["last_two", "participants"])
def whole(request, tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("whole"), [*TINY, "rounds=4", *request.param]
    return words, folder, run_recipe(folder, *words)


def test_the_output_model_is_stored_beside_x_whenever_it_is_evaluated(whole, tmp_path):
    words, folder, every = whole
    last = load_file(checkpoints(folder / "checkpoints")[-1])
    x, stored = below("params/", last), load_file(folder / "model.safetensors")
    torch.testing.assert_close(below("state/output/params/", last), stored, rtol=0, atol=0)
    assert not any(torch.equal(x[name], value) for name, value in stored.items())
    second = run_recipe(tmp_path, *words, "evaluation.every=2")
    assert second["parameters_sha256"] == every["parameters_sha256"]
    losses = [row["loss"] for row in rows_of(folder)]
    found = [row.get("loss") for row in rows_of(tmp_path)]
    assert found == [losses[0], None, losses[2], None, losses[4]]


def test_the_early_stop_stores_the_model_that_reached_the_target(whole, tmp_path):
    words, folder, summary = whole
    accuracies = [row["accuracy"] for row in rows_of(folder)]
    target = max(accuracies[1:4]) - 1e-6
    first = next(round for round, accuracy in enumerate(accuracies) if accuracy >= target)
    assert run_recipe(tmp_path, *words, f"target_accuracy={target}")["rounds"] == first < 4
    found = accuracy_of(load_file(tmp_path / "model.safetensors"))
    assert found == pytest.approx(accuracies[first], abs=1e-6)
    resumed = run_recipe(tmp_path, *words, "resume=true")
    assert resumed["parameters_sha256"] == summary["parameters_sha256"]
    assert [row["accuracy"] for row in rows_of(tmp_path)] == accuracies


def test_the_umask_says_who_may_read_a_run_and_a_clients_state_is_the_clients_own(tmp_path):
    before = os.umask(0o027)  # the group of a shared folder reads
    try:
        run_recipe(tmp_path, *TINY, "strategy=fedper", "rounds=1")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    own = {path for path in modes if path.name.startswith("client-")}
    assert len(own) == 3
    assert {modes[path] for path in own} == {0o700}
    folders = {path for path in modes if path.is_dir()} - own
    assert {modes[path] for path in folders} == {0o750}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o640}


@pytest.mark.parametrize("early", [False, True], ids=["all rounds", "early stop"])
def test_a_run_that_lacks_no_more_than_its_end_is_completed_without_another_round(early, tmp_path):
    words = [*TINY, "rounds=3", "checkpoint.every=1"]
    words += ["early_stopping.patience=1", "early_stopping.min_delta=1"] if early else []
    before = run_recipe(tmp_path, *words)
    assert before["rounds"] == (1 if early else 3)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / name).unlink()
    half = tmp_path / "checkpoints" / ".round-000003.safetensors.0123456789abcdef"
    half.touch()  # a process that was killed leaves it
    after = run_recipe(tmp_path, *words, "resume=true")
    same = ("rounds", "status", "parameters_sha256", "stop_reason")
    assert [after.get(key) for key in same] == [before.get(key) for key in same]
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows
    assert not half.exists()
    assert (tmp_path / "model.safetensors").exists()
    if early:
        with refused("patience"):
            run_recipe(tmp_path, *words, "resume=true")
        assert (tmp_path / "metrics.jsonl").read_bytes() == rows
        assert read_summary(tmp_path)["status"] == "completed"
        longer = run_recipe(tmp_path, *words, "resume=true", "early_stopping.patience=2")
        assert longer["rounds"] == 2
    else:
        with refused("rounds=3"):
            run_recipe(tmp_path, *words, "resume=true")
        (tmp_path / "summary.json").unlink()  # what fewer rounds would be called is not there
        with refused("rounds=2"):
            run_recipe(tmp_path, *words, "resume=true", "rounds=2")


@pytest.mark.parametrize("early", [False, True], ids=["all rounds", "target"])
def test_an_extension_that_was_killed_before_its_summary_is_completed(early, tmp_path):
    """What is there is of the shorter run: summary.json, and the model."""
    words = [*TINY, "local.epochs=1", "checkpoint.every=1"]
    run_recipe(tmp_path, *words, "rounds=1")
    names = ("summary.json", "model.safetensors")
    shorter = {name: (tmp_path / name).read_bytes() for name in names}
    extended = run_recipe(tmp_path, *words, "rounds=2", "resume=true")
    for name, content in shorter.items():
        (tmp_path / name).write_bytes(content)
    target = f"target_accuracy={extended['accuracy'] - 1e-6}"
    end = ["rounds=9", target] if early else ["rounds=2"]
    again = run_recipe(tmp_path, *words, *end, "resume=true")
    assert again["rounds"] == extended["rounds"] == 2
    assert again["parameters_sha256"] == extended["parameters_sha256"]
    assert (tmp_path / "model.safetensors").read_bytes() != shorter["model.safetensors"]


def test_a_run_without_a_valid_reply_says_so_again_when_it_is_resumed(tmp_path):
    words = [*TINY, "rounds=1", "checkpoint.every=1"]

    def lose(reply):
        return None if METRICS in reply.content else reply

    with pytest.raises(
        RuntimeError, match=r"no round of 1 had min_replies.*clients \(0, 1, 2\): no reply within"
    ):
        run_recipe(tmp_path, *words, tamper=lose)
    with refused("set rounds"):
        run_recipe(tmp_path, *words, "resume=true")
    assert run_recipe(tmp_path, *words, "resume=true", "rounds=2")["status"] == "completed"
