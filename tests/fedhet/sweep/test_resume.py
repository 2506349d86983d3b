"""`--resume`: what becomes of the command line, and of each job's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from common.errors import ConfigError
from conf import compose, fingerprint, quoted, resume_fingerprint
from fedhet.sweep.resume import Plan, make_ready, plan_for, resuming, take_resume
from fedhet.sweep.sweep_folder import Sweep, SweepFolder
from server_app.checkpoint import Checkpoint, save_checkpoint
from strategies.round.round_report import StrategyState


def recipe_of(*words: str) -> DictConfig:
    return compose({"overrides": json.dumps(["rounds=10", *words])})


def write_summary(folder: Path, recipe: DictConfig, status: str) -> None:
    summary = {"status": status, "fingerprint": fingerprint(recipe)}
    (folder / "summary.json").write_text(json.dumps(summary))


def write_checkpoint(folder: Path, recipe: DictConfig, round: int) -> None:
    state = StrategyState(
        round=round, experiment="x", committed={}, failed_rounds=0, tensors={"a": {}}
    )
    checkpoint = Checkpoint({"w": torch.ones(3)}, state, resume_fingerprint(recipe))
    save_checkpoint(folder / "checkpoints", checkpoint)


def test_a_completed_job_of_the_same_recipe_is_skipped(tmp_path: Path) -> None:
    write_summary(tmp_path, recipe_of(), "completed")
    assert plan_for(tmp_path, recipe_of()) is Plan.SKIP
    assert plan_for(tmp_path, recipe_of("runtime=local", "device=cpu")) is Plan.SKIP  # the same
    assert plan_for(tmp_path, recipe_of("seed=1")) is Plan.REPLACE


def test_a_job_continues_from_its_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, recipe_of(), 3)
    write_checkpoint(tmp_path, recipe_of(), 4)
    assert plan_for(tmp_path, recipe_of()) is Plan.CONTINUE
    write_summary(tmp_path, recipe_of(), "failed")
    assert plan_for(tmp_path, recipe_of()) is Plan.CONTINUE
    assert plan_for(tmp_path, recipe_of("rounds=4")) is Plan.RESTART  # it died before its summary
    assert plan_for(tmp_path, recipe_of("local.lr=0.2")) is Plan.REPLACE


def test_a_completed_job_continues_when_more_rounds_are_asked_for(tmp_path: Path) -> None:
    write_summary(tmp_path, recipe_of(), "completed")
    write_checkpoint(tmp_path, recipe_of(), 10)
    assert plan_for(tmp_path, recipe_of()) is Plan.SKIP
    assert plan_for(tmp_path, recipe_of("rounds=11")) is Plan.CONTINUE
    assert plan_for(tmp_path, recipe_of("rounds=9")) is Plan.REPLACE


def test_a_job_that_failed_before_its_first_checkpoint_restarts(tmp_path: Path) -> None:
    assert plan_for(tmp_path / "not there", recipe_of()) is Plan.RESTART
    write_summary(tmp_path, recipe_of(), "failed")
    assert plan_for(tmp_path, recipe_of()) is Plan.RESTART
    (tmp_path / "summary.json").write_text('{"half')
    assert plan_for(tmp_path, recipe_of()) is Plan.RESTART


def test_a_relative_path_is_the_absolute_one_that_the_apps_have(tmp_path: Path) -> None:
    path = Path("words.txt")
    absolute = f"task.vocabulary_file={quoted(str(path.absolute()))}"
    write_summary(tmp_path, recipe_of("task=imdb", absolute), "completed")
    assert plan_for(tmp_path, recipe_of("task=imdb", f"task.vocabulary_file={path}")) is Plan.SKIP


def test_only_a_restart_removes_what_was_there_except_the_log(tmp_path: Path) -> None:
    (tmp_path / "client_state").mkdir()
    for name in ("log.txt", "metrics.jsonl", "client_state/x"):
        (tmp_path / name).write_text(name)
    make_ready(tmp_path, Plan.CONTINUE)
    make_ready(tmp_path, Plan.SKIP)
    assert len(list(tmp_path.rglob("*"))) == 4
    make_ready(tmp_path, Plan.RESTART)
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_a_replaced_folder_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "0_job"
    for content in ("first", "second"):
        folder.mkdir(exist_ok=True)
        (folder / "summary.json").write_text(content)
        make_ready(folder, Plan.REPLACE)
        assert list(folder.iterdir()) == []
    kept = sorted((tmp_path / "replaced").rglob("summary.json"))
    assert [path.read_text() for path in kept] == ["first", "second"]


# ---- the command line ------------------------------------------------------------------------


def sweep_at(path: Path, *overrides: str, began: str = "2026-01-01T00:00:00+0000") -> Path:
    path.mkdir(parents=True)
    SweepFolder(path).write(Sweep(overrides=overrides, began=began))
    return path


def test_without_resume_the_words_stay_the_same() -> None:
    assert take_resume(["-m", "seed=0,1"]) == ["-m", "seed=0,1"]
    assert not resuming()


@pytest.mark.parametrize("form", ["--resume F", "--resume=F", "--resume hydra.sweep.dir=F"])
def test_typed_words_replace_those_of_the_folder(tmp_path: Path, form: str) -> None:
    folder = sweep_at(tmp_path / "sweep", "seed=0,1", "rounds=10", "+experiment=x/y")
    given = form.replace("F", str(folder)).split()
    words = take_resume(["-m", *given, "rounds=20", "--config-dir", "mine"])
    assert resuming()
    assert words == [
        *("-m", "--config-dir", "mine"),  # flags first: Hydra wants the overrides in one piece
        *("seed=0,1", "+experiment=x/y", "rounds=20"),
        f"hydra.sweep.dir='{folder}'",
    ]


def test_without_a_folder_the_newest_sweep_of_the_same_words_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    sweep_at(results / "a", "seed=0,1", "strategy=fedavg", began="2026-01-01T00:00:00+0000")
    newest = sweep_at(
        results / "b", "strategy=fedavg", "seed=0,1", began="2026-01-02T00:00:00+0000"
    )
    sweep_at(results / "c", "seed=0,2", "strategy=fedavg", began="2026-01-03T00:00:00+0000")
    (results / "d").mkdir()
    (results / "d" / "sweep.json").write_text("{}")
    words = ["-m", "--resume", "seed=0,1", "strategy=fedavg", "hydra/launcher=joblib"]
    assert take_resume(words)[-1] == f"hydra.sweep.dir='{newest}'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "--resume"], r"no sweep below .*results was started with these words: \(none\)"),
        (["-m", "--resume", "seed=0,1"], r"no sweep .* these words: seed=0,1; name its folder"),
        (["-m", "--resume", "nowhere"], r"nowhere is not the folder of a sweep"),
        (
            ["--resume", "nowhere"],
            r"fedhet -m --resume FOLDER; to continue one run: .*resume=true",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        take_resume(words)
