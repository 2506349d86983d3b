"""Weights & Biases and MLflow: offline files and an SQLite store; skipped without the extras."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.results import read_rows
from tests.recipes import TINY, run_recipe
from tests.server_app.test_loggers import ROWS, killed_and_resumed, logged_run


def wandb_records(path: Path) -> list:
    """Return the records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    record_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, records, parts, at = path.read_bytes(), [], [], 7
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block that is too small for a header
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if kind == 0:
            break
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(record_pb2.Record.FromString(b"".join(parts)))
            parts = []
    return records


def wandb_history(path: Path) -> list[dict]:
    rows = []
    for record in wandb_records(path):
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


def test_wandb_offline_has_every_round_once_in_the_last_run(tmp_path):
    """An offline run cannot be gone on with: what is synced last replaces it, so it has all."""
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    rows = killed_and_resumed(tmp_path / "run", "logger=wandb", "logger.wandb.mode=offline")
    run_id = (tmp_path / "run" / "wandb" / "run_id").read_text()
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    first, second = map(wandb_history, files)
    assert [row["_step"] for row in first] == [0, 1, 2, 3]
    assert [row["_step"] for row in second] == [0, 1, 2, 3, 4, 5]
    assert [row["accuracy"] for row in second] == [row["accuracy"] for row in rows]
    assert second[1]["num_clients"] == 3
    exits = [r.exit.exit_code for r in wandb_records(files[-1]) if r.HasField("exit")]
    assert exits == [0]


class StepsTaken:
    """A W&B run as wandb resumes it online: it begins after its last step."""

    def __init__(self, step: int) -> None:
        self.step, self.logged = step, []

    def log(self, figures, step, commit):
        assert commit
        self.logged.append(step)
        self.step = step + 1


def test_wandb_online_gets_only_the_rounds_it_lacks(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    from server_app.loggers.wandb import WandB

    online = StepsTaken(step=2)
    monkeypatch.setattr(wandb, "init", lambda **words: online)
    logger = WandB()
    logger.start(logged_run(tmp_path, ROWS[:1]))
    for row in ROWS[1:]:
        logger.log(row)
    assert online.logged == [2, 3]


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


def test_an_mlflow_server_that_is_not_there_ends_the_run_before_round_1(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"logger\.mlflow cannot start"):
        run_recipe(tmp_path / "run", *TINY, "logger=mlflow")
    assert not read_rows(tmp_path / "run" / "metrics.jsonl")
