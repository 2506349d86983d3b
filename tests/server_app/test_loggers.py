"""What loggers leave behind of a run that ends, is killed and resumed, or whose logger fails."""

import csv
import logging
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flwr.app import Message

from fedhet.common.results import read_rows
from fedhet.conf import compose, fingerprint, resume_fingerprint
from fedhet.server_app.listeners import End, Finished, Start
from fedhet.server_app.loggers import Loggers
from fedhet.server_app.loggers.csv import CSV
from fedhet.server_app.loggers.tensorboard import TensorBoard
from tests.recipes import TINY, overrides, run_recipe
from tests.refused import refused

ROWS = [
    {"round": 0, "accuracy": 0.1, "elapsed_seconds": 1.0},
    {"round": 1, "accuracy": 0.5, "clients": [0, 2], "failures": [], "elapsed_seconds": 3.0},
    {"round": 2, "clients": [1], "failures": ["client 0: no, reply"], "elapsed_seconds": 4.0},
    {"round": 3, "accuracy": 0.75, "clients": [], "failures": [], "elapsed_seconds": 6.0},
]
SHORT = [*TINY, "local.epochs=1", "task.train_size=60", "task.test_size=20"]


def logged_run(folder: Path, rows: list[dict] = ()) -> Start:
    about = {"strategy": "fedavg", "task": "digits"}
    return Start(folder, about, {"seed": 0, "local": {"lr": 0.1, "clip": None}}, list(rows))


def killed_and_resumed(folder: Path, *words: str) -> list[dict]:
    """Die in round 4 with a checkpoint of round 2, and go on to round 5; return the rows."""
    recipe = [*SHORT, "rounds=5", "checkpoint.every=2", *words]
    replies = []

    def die_in_round_4(reply):
        replies.append(reply)
        if len(replies) > 3 * 4:  # three clients; the registration is the first exchange
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run_recipe(folder, *recipe, tamper=die_in_round_4)
    assert [row["round"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    run_recipe(folder, *recipe, "resume=true")
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 5]
    return rows


def read_events(folder: Path) -> list:
    """Return the events of all files: lengths and bytes with checksums (TFRecord)."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    events = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            events.append(event_pb2.Event.FromString(content[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


def scalars_of(folder: Path) -> list[tuple[int, str, float]]:
    found = ((event.step, value) for event in read_events(folder) for value in event.summary.value)
    return [
        (step, one.tag, one.simple_value) for step, one in found if one.HasField("simple_value")
    ]


@pytest.mark.slow
def test_a_resumed_run_has_every_figure_of_every_round_once(tmp_path):
    rows = killed_and_resumed(tmp_path, "logger=[csv,tensorboard]")
    lines = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    for row, line in zip(rows, lines, strict=True):
        figures = {name: value for name, value in row.items() if not isinstance(value, list)}
        assert {name: float(line[name]) for name in figures} == figures
        assert line["num_clients"] == ("" if row["round"] == 0 else "3")
    found = [(s, v) for s, tag, v in scalars_of(tmp_path) if tag == "elapsed_seconds"]
    assert found == [(row["round"], pytest.approx(row["elapsed_seconds"])) for row in rows]
    starts = [event for event in read_events(tmp_path) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(0, 1)]


def test_csv_adds_columns_that_come_late_and_is_whole_after_every_row(tmp_path):
    logger = CSV()
    logger.start(logged_run(tmp_path))
    for row in ROWS:
        logger.log(row)
    head, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert head == "round,accuracy,elapsed_seconds,num_clients,num_failures"
    assert lines == ["0,0.1,1.0,,", "1,0.5,3.0,2,0", "2,,4.0,1,1", "3,0.75,6.0,0,0"]


def test_tensorboard_has_a_row_as_soon_as_it_is_logged(tmp_path):
    logger = TensorBoard()
    logger.start(logged_run(tmp_path))
    logger.log(ROWS[2])
    assert (2, "num_failures", 1.0) in scalars_of(tmp_path)
    [recipe] = [e for e in read_events(tmp_path) if "recipe/text_summary" in str(e)]
    assert b"lr: 0.1" in recipe.summary.value[0].tensor.string_val[0]
    logger.finish({})


class Recorder:
    def __init__(self, fails_at: object) -> None:
        self.fails_at, self.calls = fails_at, []

    def start(self, run: Start) -> None:
        self.log({"round": [row["round"] for row in run.rows]})

    def log(self, row: dict) -> None:
        self.calls.append(row["round"])
        if row["round"] == self.fails_at:
            raise OSError("the disk is full")

    def finish(self, summary: dict) -> None:
        self.log({"round": summary["status"]})


def status_only(about: dict, status: str, error: str) -> dict:
    return {"status": status}


CALLS = [[0], 1, 2, 3, "completed"]


@pytest.mark.parametrize(
    ("calls", "when"), [(CALLS[:2], "in round 1"), (CALLS, "at the end")], ids=str
)
def test_a_logger_that_fails_is_dropped_and_the_others_continue(calls, when, tmp_path, caplog):
    failing, sound = Recorder(fails_at=calls[-1]), Recorder(fails_at=None)
    loggers = Loggers({"failing": failing, "sound": sound}, Mock(summary=status_only))
    loggers.on_start(logged_run(tmp_path, ROWS[:1]))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for number in range(2, len(ROWS) + 1):
            loggers.on_round(Finished(None, ROWS[:number], None, {}, 3))
        loggers.on_end(End("completed"))
    assert (failing.calls, sound.calls) == (calls, CALLS)
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"logger.failing failed {when}" in warning
    assert "OSError: the disk is full" in warning


@pytest.mark.slow
def test_a_logger_that_cannot_start_ends_the_run_before_round_1(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    with refused("logger.csv"):
        run_recipe(tmp_path, *SHORT)
    assert not read_rows(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_what_nodes_and_resumed_runs_do_not_compare():
    words = [
        "logger=[csv,tensorboard]",
        "local.reuse_training=/a/folder",
        "calibration.alphas=[0.1]",
        "partition.holdout=0.1",
    ]
    plain = compose(overrides("logger=none", "partition.holdout=0.1"))
    other = compose(overrides(*words))
    assert fingerprint(plain) == fingerprint(other)
    assert resume_fingerprint(plain) == resume_fingerprint(other)


@pytest.mark.slow
def test_loggers_finish_before_the_summary_of_a_completed_run_and_with_a_failed_one(
    tmp_path, monkeypatch
):
    ends = []

    def finish(self: CSV, summary: dict) -> None:
        ends.append((summary, list(tmp_path.glob("*/summary*"))))

    def lose_training(reply: Message) -> Message | None:
        return None if reply.metadata.message_type == "train" else reply

    monkeypatch.setattr(CSV, "finish", finish)
    run_recipe(tmp_path / "run", *SHORT)
    with refused("3 rounds", kind=RuntimeError):
        run_recipe(tmp_path / "failed", *SHORT, "rounds=4", tamper=lose_training)
    (completed, written), (failed, _) = ends
    assert (completed["status"], written) == ("completed", [])
    assert failed["status"] == "failed"
    assert "3 rounds in a row" in failed["error"]


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
    from fedhet.server_app.loggers.wandb import WandB

    run = StepsTaken(step)
    monkeypatch.setattr(wandb, "init", lambda **words: run)
    logger = WandB()
    logger.start(logged_run(tmp_path, ROWS[:1]))
    for row in ROWS[1:]:
        logger.log(row)
    assert run.logged == logged


def test_wandb_has_another_run_if_the_first_round_comes_again(tmp_path, monkeypatch):
    """With resume=true and no checkpoint: W&B would keep the first attempt's rounds."""
    ids = []
    package = SimpleNamespace(Settings=dict, init=lambda id, **_: ids.append(id))
    monkeypatch.setitem(sys.modules, "wandb", package)
    from fedhet.server_app.loggers.wandb import WandB

    first = logged_run(tmp_path)
    for run in (first, first, replace(first, done=1)):
        WandB().start(run)
    assert ids[0] != ids[1] == ids[2]


def test_mlflow_of_a_resumed_run_has_every_round_once(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rows = killed_and_resumed(tmp_path / "run", "logger=mlflow")
    folder = tmp_path / "run" / "mlflow"
    store = tracking.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    [run] = store.search_runs([store.get_experiment_by_name("fedhet").experiment_id])
    assert (run.info.run_id, run.info.status) == ((folder / "run_id").read_text(), "FINISHED")
    history = store.get_metric_history(run.info.run_id, "accuracy")
    found = [(point.step, point.value) for point in history]
    assert found == [(row["round"], row["accuracy"]) for row in rows]
    assert (run.data.params["local.lr"], run.data.tags["strategy"]) == ("0.2", "fedavg")
    assert run.data.metrics["summary/rounds"] == 5
