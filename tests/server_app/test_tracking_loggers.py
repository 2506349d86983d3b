"""Weights & Biases and MLflow: offline files and an SQLite store; skipped without the extras."""

from __future__ import annotations

import math

import pytest

from tests.server_app.test_loggers import ROWS, killed_and_resumed, logged_run


class StepsTaken:
    """A W&B run; as wandb resumes it online, it begins after its last step, and offline at 0."""

    def __init__(self, step: int) -> None:
        self.step, self.logged = step, []

    def log(self, figures, step, commit):
        assert commit
        self.logged.append(step)
        self.step = step + 1


@pytest.mark.parametrize(("step", "logged"), [(0, [0, 1, 2, 3]), (2, [2, 3])])
def test_wandb_gets_only_the_rounds_it_lacks(step, logged, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    from server_app.loggers.wandb import WandB

    run = StepsTaken(step)
    monkeypatch.setattr(wandb, "init", lambda **words: run)
    logger = WandB()
    logger.start(logged_run(tmp_path, ROWS[:1]))
    for row in ROWS[1:]:
        logger.log(row)
    assert run.logged == logged


def test_mlflow_of_a_resumed_run_has_every_round_once(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rows = killed_and_resumed(tmp_path / "run", "logger=mlflow")
    store = tracking.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}")
    [run] = store.search_runs([store.get_experiment_by_name("fedhet").experiment_id])
    assert run.info.run_id == (tmp_path / "run" / "mlflow" / "run_id").read_text()
    assert run.info.status == "FINISHED"
    history = store.get_metric_history(run.info.run_id, "accuracy")
    assert [(point.step, point.value) for point in history] == [
        (row["round"], row["accuracy"]) for row in rows
    ]
    assert run.data.params["local.lr"] == "0.2"
    assert run.data.tags["strategy"] == "fedavg"
    assert run.data.metrics["summary/rounds"] == 5


def test_mlflow_takes_figures_that_are_no_numbers(tmp_path):
    """A run that diverges has NaN and Inf; the store keeps them and the run goes on."""
    pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    from server_app.loggers.mlflow import MLflow

    logger = MLflow(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    logger.start(logged_run(tmp_path))
    logger.log({"round": 1, "loss": math.nan, "train_loss": math.inf, "elapsed_seconds": 1.0})
    run = logger._client.get_run(logger._run_id)
    assert math.isnan(run.data.metrics["loss"])
