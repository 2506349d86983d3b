"""Runs with evaluation.metrics, early stopping and checkpoint.best, against scikit-learn."""

import pytest
import sklearn.metrics as sk
import torch
from safetensors.torch import load_file

from fedhet.common.results import read_rows
from fedhet.conf import compose_overrides
from fedhet.load_run import task_of
from fedhet.tasks.evaluation import logits_of
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

WORDS = [*TINY, "rounds=4", "partition.holdout=0.2"]
MEASURED = ["evaluation.metrics=[f1,auroc]", "evaluation.clients=true"]
# Minimised, a rising f1 stops improving at once, so these runs end early.
STOPPING = ["early_stopping.metric=f1", "early_stopping.mode=min", "early_stopping.patience=2"]
TIMES = ("seconds", "server_seconds", "elapsed_seconds", "fit_seconds")


def f1_of(path, data):
    """Macro F1 by scikit-learn, of a model file on these examples."""
    model = task_of(compose_overrides(tuple(WORDS))).build_model(5)
    model.load_state_dict(load_file(path))
    with torch.no_grad():
        logits, labels = logits_of(model, data)
    return sk.f1_score(labels, logits.argmax(1), average="macro", zero_division=0.0)


def rows_of(folder):
    rows = read_rows(folder / "metrics.jsonl")
    return [{name: row[name] for name in row if name not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_recipe(folder, *WORDS)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    more = ["evaluation.per_class=true", "evaluation.per_client=true", "checkpoint.best=f1"]
    return folder, run_recipe(folder, *WORDS, *MEASURED, *more)


def test_metrics_change_nothing_of_the_run(plain, measured):
    assert plain[1]["parameters_sha256"] == measured[1]["parameters_sha256"]
    for without, row in zip(rows_of(plain[0]), rows_of(measured[0]), strict=True):
        assert {name: row[name] for name in without} == without
    assert not any("f1" in name for row in rows_of(plain[0]) for name in row)


def test_the_server_and_the_clients_measure_what_scikit_learn_says(measured):
    folder, summary = measured
    last, task = rows_of(folder)[-1], task_of(compose_overrides(tuple(WORDS)))
    path = folder / "model.safetensors"
    assert last["f1"] == pytest.approx(f1_of(path, task.test_data()), abs=1e-6)
    assert summary["f1"] == last["f1"]
    assert summary["best_f1"] == max(row["f1"] for row in rows_of(folder))
    assert sum(name.startswith("auroc/") for name in last) == task.num_classes
    held = [task.client_data(client)[1] for client in range(3)]
    own = [f1_of(path, data) for data in held]
    assert list(last["per_client"]["client_f1"]) == ["0", "1", "2"]
    assert list(last["per_client"]["client_f1"].values()) == pytest.approx(own, abs=1e-6)
    weights = [len(data) / sum(map(len, held)) for data in held]
    mean = sum(weight * value for weight, value in zip(weights, own, strict=True))
    assert summary["client_f1"] == last["client_f1"] == pytest.approx(mean, abs=1e-6)
    assert last["per_client"].keys() >= {"received_f1", "client_accuracy", "received_loss"}


def test_best_safetensors_is_the_model_of_the_best_round(measured):
    folder, summary = measured
    scores = [row["f1"] for row in rows_of(folder)]
    best = summary["best_model"]
    assert (best["round"], best["value"]) == (scores.index(max(scores)), max(scores))
    found = f1_of(folder / best["file"], task_of(compose_overrides(tuple(WORDS))).test_data())
    assert found == pytest.approx(max(scores), abs=1e-6)


def test_a_resumed_run_stops_after_the_same_round_with_the_same_best_model(measured, tmp_path):
    scores = [row["f1"] for row in rows_of(measured[0])]
    end, lowest, passed = -1, float("inf"), 0
    while passed < 2:  # by hand
        end += 1
        lowest, passed = min(lowest, scores[end]), 0 if scores[end] < lowest else passed + 1
    words = [*WORDS, *MEASURED, *STOPPING, "checkpoint.best=true"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    once = run_recipe(whole, *words)
    assert (once["status"], once["rounds"]) == ("completed", end)
    assert once["stop_reason"].startswith("early stopping: f1 has not improved in the last 2")
    assert once["best_round"] == {"metric": "f1", "round": scores.index(lowest), "value": lowest}
    run_recipe(parts, *words, "rounds=1")
    twice = run_recipe(parts, *words, "resume=true")
    assert rows_of(parts) == rows_of(whole)
    same = ("rounds", "stop_reason", "best_round", "best_model", "parameters_sha256")
    assert {key: twice[key] for key in same} == {key: once[key] for key in same}
