"""The output model on disk: model.safetensors, checkpoints, the early stop, resuming."""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.results import read_rows
from conf import compose, plain_part
from server_app.checkpoint import checkpoints
from strategies.round.tensor_files import below
from tasks import build_task
from tasks.evaluation import evaluate_model
from tests.recipes import TINY, overrides, run_recipe

pytestmark = pytest.mark.slow

LAST_TWO = ["strategy=fedavg", "strategy/output=last_two"]
PARTICIPANTS = ["strategy=feddyn", "strategy.feddyn.alpha=0.1", "participation=0.67"]
CASES = pytest.mark.parametrize("words", [LAST_TWO, PARTICIPANTS], ids=["last_two", "participants"])


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


def evaluate(tensors: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return loss and accuracy of these tensors in a fresh network."""
    recipe = compose(overrides(*TINY))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=0, num_clients=3)
    model = task.build_model(5)
    model.load_state_dict(tensors)
    return evaluate_model(model, task.test_data(torch.device("cpu")), task.loss)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder and summary of four rounds of these words; a run each."""

    @cache
    def run(*words: str) -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp("whole") / "run"
        return folder, run_recipe(folder, *TINY, "rounds=4", *words)

    return run


@CASES
def test_a_checkpoint_holds_x_and_the_output_model_at_any_interval_of_evaluation(
    words, whole, tmp_path
):
    """Two models; the stored one is the second, and has the loss of the last row."""
    folder, every = whole(*words)
    last = load_file(checkpoints(folder / "checkpoints")[-1])
    x, output_model = below("params/", last), below("state/output/params/", last)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(output_model[name], value) for name, value in stored.items())
    assert not any(torch.equal(x[name], value) for name, value in stored.items())
    loss, accuracy = evaluate(stored)
    row = rows_of(folder)[-1]
    assert loss == pytest.approx(row["loss"], rel=1e-5)
    assert accuracy == pytest.approx(row["accuracy"], abs=1e-6)
    assert abs(evaluate(x)[0] - loss) > 1e-3
    second = run_recipe(tmp_path / "second", *TINY, "rounds=4", "evaluation.every=2", *words)
    assert second["parameters_sha256"] == every["parameters_sha256"]
    losses = {row["round"]: row["loss"] for row in rows_of(folder)}
    assert {row["round"]: row["loss"] for row in rows_of(tmp_path / "second") if "loss" in row} == {
        round: losses[round] for round in (0, 2, 4)
    }


@CASES
def test_the_early_stop_stores_the_model_that_reached_the_target(words, whole, tmp_path):
    """Resuming without a target continues from x, as if there had been no target."""
    folder, summary = whole(*words)
    accuracies = [row["accuracy"] for row in rows_of(folder)]
    reached = max(range(1, 4), key=lambda round: accuracies[round])
    target = f"target_accuracy={accuracies[reached] - 1e-6}"
    stopped = run_recipe(tmp_path / "cut", *TINY, "rounds=4", target, *words)
    first = min(r for r in range(4) if accuracies[r] >= accuracies[reached] - 1e-6)
    assert stopped["rounds"] == first < 4
    assert evaluate(load_file(tmp_path / "cut" / "model.safetensors"))[1] == pytest.approx(
        accuracies[first], abs=1e-6
    )
    resumed = run_recipe(tmp_path / "cut", *TINY, "rounds=4", *words, "resume=true")
    assert resumed["parameters_sha256"] == summary["parameters_sha256"]
    assert [row["accuracy"] for row in rows_of(tmp_path / "cut")] == accuracies


def lose_train_replies(begin: int, end: int):
    """Return a tamper that loses the begin-th to the end-th train reply, the latter excluded."""
    number = count()

    def tamper(reply):
        trained = reply.has_content() and "update" in reply.content.array_records
        return None if trained and begin <= next(number) < end else reply

    return tamper


@CASES
def test_a_resumed_run_whose_rounds_fail_equals_an_uninterrupted_one(words, tmp_path):
    """All replies of round 2, the last, are lost: two or three."""
    size = 2 if "participation=0.67" in words else 3
    whole = run_recipe(tmp_path / "whole", *TINY, *words, tamper=lose_train_replies(size, 2 * size))
    run_recipe(tmp_path / "cut", *TINY, "rounds=1", *words)
    resumed = run_recipe(
        tmp_path / "cut", *TINY, *words, "resume=true", tamper=lose_train_replies(0, size)
    )
    assert resumed["failures"] == whole["failures"] == size
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    rows = rows_of(tmp_path / "cut")
    assert [row["loss"] for row in rows] == [row["loss"] for row in rows_of(tmp_path / "whole")]
    assert rows[2]["loss"] == rows[1]["loss"] != rows[0]["loss"]


def test_personal_tensors_stay_at_the_clients(tmp_path):
    """The output model is the shared part; every client evaluates it under its own head."""
    words = ["strategy=fedper", "partition=iid", "evaluation.clients=true", "rounds=3"]
    run_recipe(tmp_path / "latest", *TINY, *words)
    run_recipe(tmp_path / "last_two", *TINY, *words, "strategy/output=last_two")
    stored = load_file(tmp_path / "last_two" / "model.safetensors")
    assert stored.keys() == load_file(tmp_path / "latest" / "model.safetensors").keys()
    assert not any(name.startswith("head") for name in stored)
    latest, last_two = rows_of(tmp_path / "latest"), rows_of(tmp_path / "last_two")
    assert last_two[-1]["client_loss"] != latest[-1]["client_loss"]
    assert last_two[-1]["client_loss"] < last_two[1]["client_loss"]
    for name in ("personal_test_accuracy", "train_loss", "accuracy"):  # of the clients' own models
        assert last_two[-1][name] == latest[-1][name]
