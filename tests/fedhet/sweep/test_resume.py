"""`--resume`: what becomes of the command line, and of each job's folder."""

import json
from pathlib import Path

import pytest
import torch

from fedhet.conf import compose, fingerprint, quoted, resume_fingerprint
from fedhet.server_app.checkpoint import Checkpoint, save_checkpoint
from fedhet.strategies.round.round_report import StrategyState
from fedhet.sweep.resume import FolderTaken, Plan, make_ready, plan_for, resuming, take_resume
from fedhet.sweep.sweep_folder import Sweep, SweepFolder
from tests.refused import refused


def recipe_of(*words):
    return compose({"overrides": json.dumps(["rounds=10", *words])})


def write_summary(folder, status, *words):
    summary = {"status": status, "fingerprint": fingerprint(recipe_of(*words))}
    (folder / "summary.json").write_text(json.dumps(summary))


def is_taken(folder, recipe):
    with refused("hydra.sweep.subdir", kind=FolderTaken):
        plan_for(folder, recipe)
    return True


def write_checkpoint(folder, round):
    state = StrategyState(
        round=round, experiment="x", committed={}, failed_rounds=0, tensors={"a": {}}
    )
    checkpoint = Checkpoint({"w": torch.ones(3)}, state, resume_fingerprint(recipe_of()))
    save_checkpoint(folder / "checkpoints", checkpoint)


@pytest.mark.slow
def test_a_completed_job_of_the_same_recipe_is_skipped(tmp_path):
    write_summary(tmp_path, "completed")
    assert plan_for(tmp_path, recipe_of()) is Plan.SKIP
    assert plan_for(tmp_path, recipe_of("runtime=local", "device=cpu")) is Plan.SKIP  # the same
    assert is_taken(tmp_path, recipe_of("seed=1"))
    write_checkpoint(tmp_path, 10)
    assert plan_for(tmp_path, recipe_of()) is Plan.SKIP
    assert plan_for(tmp_path, recipe_of("rounds=11")) is Plan.CONTINUE
    assert is_taken(tmp_path, recipe_of("rounds=9"))
    path = Path("words.txt")  # the apps know it by its absolute path
    absolute = f"task.vocabulary_file={quoted(str(path.absolute()))}"
    write_summary(tmp_path, "completed", "task=imdb", absolute)
    assert plan_for(tmp_path, recipe_of("task=imdb", f"task.vocabulary_file={path}")) is Plan.SKIP


@pytest.mark.slow
def test_a_job_that_early_stopping_has_ended_is_skipped_also_where_more_rounds_are_asked(tmp_path):
    words = ("early_stopping.patience=2", "early_stopping.metric=loss")
    summary = {"status": "completed", "fingerprint": fingerprint(recipe_of(*words))}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"stop_reason": "no better"}))
    rows = [{"round": t, "loss": loss} for t, loss in enumerate([2.0, 1.0, 1.5, 1.5])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_checkpoint(tmp_path, 3)
    assert plan_for(tmp_path, recipe_of(*words)) is Plan.SKIP
    assert plan_for(tmp_path, recipe_of(*words, "rounds=20")) is Plan.SKIP
    more = ("early_stopping.patience=3", "early_stopping.metric=loss")
    assert plan_for(tmp_path, recipe_of(*more)) is Plan.CONTINUE
    assert plan_for(tmp_path, recipe_of("rounds=20", "target_accuracy=0.9")) is Plan.CONTINUE
    assert is_taken(tmp_path, recipe_of(*words, "local.lr=0.2"))
    assert is_taken(tmp_path, recipe_of(*words, "rounds=2"))
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    assert plan_for(tmp_path, recipe_of(*words, "rounds=20")) is Plan.CONTINUE


@pytest.mark.slow
def test_a_job_continues_from_its_checkpoint_and_restarts_without_one(tmp_path):
    assert plan_for(tmp_path / "not there", recipe_of()) is Plan.RESTART
    write_summary(tmp_path, "failed")
    assert plan_for(tmp_path, recipe_of()) is Plan.RESTART
    (tmp_path / "summary.json").write_text('{"half')
    assert plan_for(tmp_path, recipe_of()) is Plan.RESTART
    write_checkpoint(tmp_path, 3)
    write_checkpoint(tmp_path, 4)
    assert plan_for(tmp_path, recipe_of()) is Plan.CONTINUE
    write_summary(tmp_path, "failed")
    assert plan_for(tmp_path, recipe_of()) is Plan.CONTINUE
    assert plan_for(tmp_path, recipe_of("rounds=4")) is Plan.CONTINUE  # it died before its summary
    assert is_taken(tmp_path, recipe_of("rounds=3"))
    assert is_taken(tmp_path, recipe_of("local.lr=0.2"))


def test_a_restart_removes_all_but_the_log(tmp_path):
    folder = tmp_path / "job"
    (folder / "client_state").mkdir(parents=True)
    for name in ("log.txt", "metrics.jsonl", "client_state/x"):
        (folder / name).write_text(name)
    make_ready(folder, Plan.CONTINUE)
    make_ready(folder, Plan.SKIP)
    assert len(list(folder.rglob("*"))) == 4
    make_ready(folder, Plan.RESTART)
    assert [path.name for path in folder.iterdir()] == ["log.txt"]


def sweep_at(path, *overrides, day=1):
    path.mkdir(parents=True)
    SweepFolder(path).write(Sweep(overrides, began=f"2026-01-0{day}T00:00:00+0000"))
    return path


@pytest.mark.parametrize("form", ["--resume F", "--resume=F", "--resume hydra.sweep.dir=F"])
def test_typed_words_replace_those_of_the_folder(tmp_path, form):
    folder = sweep_at(tmp_path / "sweep", "seed=0,1", "rounds=10", "+experiment=x/y")
    assert take_resume(["-m", "seed=0,1"]) == ["-m", "seed=0,1"]
    assert not resuming()
    given = form.replace("F", str(folder)).split()
    words = take_resume(["-m", *given, "rounds=20", "--config-dir", "mine"])
    assert resuming()
    assert words == [
        *("-m", "--config-dir", "mine"),  # flags first: Hydra wants the overrides in one piece
        *("seed=0,1", "+experiment=x/y", "rounds=20"),
        f"hydra.sweep.dir='{folder}'",
    ]


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path):
    folder = sweep_at(tmp_path / "lr=0.1", "seed=0,1")
    words = take_resume(["-m", "--resume", str(folder)])
    assert words == ["-m", "seed=0,1", f"hydra.sweep.dir='{folder}'"]


def test_without_a_folder_the_newest_sweep_of_the_same_words_continues(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    sweep_at(results / "a", "seed=0,1", "strategy=fedavg", day=1)
    newest = sweep_at(results / "b", "strategy=fedavg", "seed=0,1", day=2)
    sweep_at(results / "c", "seed=0,2", "strategy=fedavg", day=3)
    (results / "d").mkdir()
    (results / "d" / "sweep.json").write_text("{}")
    words = ["-m", "--resume", "seed=0,1", "strategy=fedavg", "hydra/launcher=joblib"]
    assert take_resume(words)[-1] == f"hydra.sweep.dir='{newest}'"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-m", "--resume"], ["results"]),
        (["-m", "--resume", "seed=0,1"], ["seed=0,1"]),
        (["-m", "--resume", "nowhere"], ["nowhere"]),
        (["--resume", "nowhere"], ["--resume", "resume=true"]),
    ],
)
def test_what_cannot_be_resumed_is_refused(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(*named):
        take_resume(words)
