"""One job of a sweep, with a run that only pretends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import open_dict

from common.results import read_summary, totals
from conf import fingerprint, resume_fingerprint
from fedhet.runtimes.flower_install import LaunchError
from fedhet.sweep.job import run_job
from fedhet.sweep.optuna_search import FIGURES
from fedhet.sweep.sweep_folder import Sweep, SweepFolder

BEGAN = "2026-01-01T00:00:00+0000"


@pytest.fixture
def sweep(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    folder.path.mkdir()
    folder.write(Sweep(overrides=(), began=BEGAN))
    yield folder
    HydraConfig.instance().cfg = None


def job_of(sweep, number=0, *words, folder_name=""):
    """Return a job's recipe; Hydra's configuration is that of the job."""
    setup_globals()
    settings = [f"hydra.sweep.dir={sweep.path}", "hydra.sweep.subdir=${hydra.job.num}_job"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=[*words, *settings], return_hydra_config=True)
    folder = sweep.path / (folder_name or f"{number}_job")
    folder.mkdir(exist_ok=True)
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.runtime.output_dir = str(folder)
        config.hydra.overrides.task = list(words)
    HydraConfig.instance().set_config(config)
    recipe = config.copy()
    with open_dict(recipe):
        del recipe["hydra"]
    return recipe


def finish(recipe, **figures):
    summary = {"status": "completed", "fingerprint": fingerprint(recipe), **figures}
    (Path(recipe.results_dir) / "summary.json").write_text(json.dumps(summary))


def summary_of(sweep, number=0):
    return read_summary(sweep.path / f"{number}_job")


def test_a_job_returns_the_objective_and_reports(sweep):
    sweep.write(Sweep(overrides=(), began=BEGAN, objective="loss"))
    seen = []

    def run(recipe):
        seen.append((recipe.results_dir, recipe.resume, sweep.reports()[0].status))
        finish(recipe, accuracy=0.5, loss=1.5, clients=10)

    assert run_job(job_of(sweep, 3, "seed=7"), run) == 1.5
    assert seen == [(str(sweep.path / "3_job"), False, "running")]
    [report] = sweep.reports()
    assert (report.number, report.folder, report.status) == (3, "3_job", "completed")
    assert report.overrides == ["seed=7"]
    assert report.figures == {"accuracy": 0.5, "loss": 1.5}


def test_a_failed_job_says_why_in_its_log_and_is_a_failed_trial(sweep, capfd):
    errors = {
        "the run failed: no data": LaunchError("the run failed: no data\nits log: x/log.txt"),
        "OSError: disk full": OSError("disk full"),
    }
    for number, (reason, error) in enumerate(errors.items()):

        def run(recipe, error=error):
            os.write(1, b"straight to stdout\n")
            subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
            raise error

        with capfd.disabled():  # it puts an object of its own in the place of sys.stderr
            assert run_job(job_of(sweep, number), run) is None
        report, summary = sweep.reports()[number], summary_of(sweep, number)
        assert (report.status, report.error) == ("failed", reason)
        assert (summary["status"], summary["error"]) == ("failed", reason)
        assert (summary["strategy"], summary["task"], summary["seed"]) == ("fedavg", "digits", 0)
        log = (sweep.path / f"{number}_job" / "log.txt").read_text()
        assert all(words in log for words in ("straight to stdout", "a child", str(error)))

    own = {"status": "failed", "error": "its own", "rounds": 3}  # the ServerApp's

    def write(recipe):
        (Path(recipe.results_dir) / "summary.json").write_text(json.dumps(own))
        raise LaunchError("the run failed: its own")

    run_job(job_of(sweep, 2), write)
    assert summary_of(sweep, 2) == own


def test_an_objective_that_was_not_measured_is_a_failed_trial(sweep):
    measured = [{}, {"accuracy": float("nan")}, {"accuracy": None}]
    for number, figures in enumerate(measured):
        found = run_job(job_of(sweep, number), lambda recipe, own=figures: finish(recipe, **own))
        assert found is None
        assert sweep.reports()[number].status == "completed"


def test_the_figures_to_optimise_are_those_of_a_summary():
    row = {"round": 1, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "failures": []}
    row |= {"client_accuracy": 0.5, "client_loss": 1.0}
    assert set(FIGURES) == {*totals([row]), "wall_seconds"}


def test_a_resumed_sweep_skips_what_is_done_and_resumes_the_rest_everywhere(sweep, monkeypatch):
    run_job(job_of(sweep), lambda recipe: finish(recipe, accuracy=0.75))
    sweep.clear()
    sweep.write(Sweep(overrides=(), began=BEGAN, resumed=(BEGAN,)))
    assert run_job(job_of(sweep), lambda recipe: pytest.fail("was run again")) == 0.75
    [report] = sweep.reports()
    assert (report.status, report.skipped) == ("completed", True)
    second = job_of(sweep, 1, "seed=7")
    checkpoint = {"round": 1, "recipe": resume_fingerprint(second)}
    monkeypatch.setattr("fedhet.sweep.resume._last_checkpoint", lambda folder: checkpoint)
    seen = []

    def run(recipe):
        seen.append((recipe.resume, list(HydraConfig.get().overrides.task)))

    run_job(second, run)
    assert seen == [(True, ["seed=7", "resume=true"])]  # in the launcher, and in the apps


def test_a_job_that_a_cluster_starts_again_restarts(sweep):
    def die(recipe):
        (Path(recipe.results_dir) / "metrics.jsonl").write_text("round 0")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job_of(sweep), die)
    assert sweep.reports()[0].status == "stopped"
    assert run_job(job_of(sweep), lambda recipe: finish(recipe, accuracy=0.5)) == 0.5
    assert not (sweep.path / "0_job" / "metrics.jsonl").exists()  # there was no checkpoint


def test_a_folder_of_another_job_or_with_another_content_is_not_written_to(sweep):
    run_job(job_of(sweep, 0), lambda recipe: finish(recipe, accuracy=0.5))
    second = job_of(sweep, 1, folder_name="0_job")
    assert run_job(second, lambda recipe: pytest.fail("was run")) is None
    assert "hydra.sweep.subdir" in sweep.reports()[1].error
    assert summary_of(sweep)["status"] == "completed"  # the first job's
    third = job_of(sweep, 2)
    (sweep.path / "2_job" / "thesis.tex").touch()
    assert run_job(third, lambda recipe: pytest.fail("was run")) is None
    assert "is not empty" in sweep.reports()[2].error
    assert [path.name for path in (sweep.path / "2_job").iterdir()] == ["thesis.tex"]
    sweep.ask_to_stop()
    assert run_job(job_of(sweep, 3), lambda recipe: pytest.fail("was run")) is None
    assert len(sweep.reports()) == 3  # no job begins once the sweep is stopping


def test_a_worker_that_is_asked_to_end_cleans_up_first(sweep):
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def run(recipe):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5.0)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # once more, in the middle of it
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        run_job(job_of(sweep), run)
    assert (ended.value.code, cleaned) == (143, [True])
    assert sweep.reports()[0].status == "stopped"
    assert signal.getsignal(signal.SIGTERM) == before
