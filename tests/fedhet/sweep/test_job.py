"""One job of a sweep, with a run that only pretends; test_session.py has whole sweeps."""

import json
import os
import signal
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import open_dict

from fedhet.common.metrics import figures_of
from fedhet.common.results import read_summary, totals
from fedhet.conf import fingerprint
from fedhet.conf.project import register_recipes
from fedhet.conf.schema import FIGURES
from fedhet.runtimes.flower_install import LaunchError
from fedhet.sweep.job import run_job
from fedhet.sweep.sweep_folder import Sweep, SweepFolder

BEGAN = "2026-01-01T00:00:00+0000"


@pytest.fixture
def sweep(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    folder.path.mkdir()
    folder.write(Sweep(overrides=(), began=BEGAN))
    yield folder
    HydraConfig.instance().cfg = None


def job_of(sweep, number=0, folder_name=""):
    """Return a job's recipe; Hydra's configuration is that of the job."""
    setup_globals()
    register_recipes()
    settings = [f"hydra.sweep.dir={sweep.path}", "hydra.sweep.subdir=${hydra.job.num}_job"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=settings, return_hydra_config=True)
    folder = sweep.path / (folder_name or f"{number}_job")
    folder.mkdir(exist_ok=True)
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(config)
    recipe = config.copy()
    with open_dict(recipe):
        del recipe["hydra"]
    return recipe


def finish(recipe, **figures):
    summary = {"status": "completed", "fingerprint": fingerprint(recipe), **figures}
    (Path(recipe.results_dir) / "summary.json").write_text(json.dumps(summary))


def not_run(recipe):
    pytest.fail("was run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "objective"), [(1.5, 1.5), (float("nan"), None), (None, None), ("no", None)]
)
def test_an_objective_that_was_not_measured_is_a_failed_trial(sweep, loss, objective):
    sweep.write(Sweep(overrides=(), began=BEGAN, objective="loss"))
    figures = {"accuracy": 0.5} if loss == "no" else {"accuracy": 0.5, "loss": loss}
    assert run_job(job_of(sweep), lambda recipe: finish(recipe, **figures)) == objective
    assert sweep.reports()[0].status == "completed"


def test_the_figures_to_optimise_are_those_of_a_summary():
    row = {"round": 1, "client_accuracy": 0.5, "client_loss": 1.0, "personal_accuracy": 0.6}
    row |= {"failures": [], **dict.fromkeys(("seconds", "bytes_up", "bytes_down"), 1)}
    assert set(FIGURES) == {*totals([row]), "wall_seconds"}
    measured = {"rmse": 2.0, "client_rmse": 3.0, "personal_rmse": 1.0, "personal_test_rmse": 4.0}
    assert {*totals([row | measured])} == {*totals([row]), *figures_of(["rmse"])}
    three = [(1, 0.2, 9.0), (2, 0.8, 1.0), (3, 0.6, 3.0)]  # round 1 starts the workers
    found = totals([row | {"round": n, "accuracy": a, "seconds": s} for n, a, s in three])
    assert (found["accuracy"], found["best_accuracy"], found["seconds_per_round"]) == (0.6, 0.8, 2)


@pytest.mark.slow
def test_a_job_that_a_cluster_starts_again_restarts(sweep):
    def die(recipe):
        (Path(recipe.results_dir) / "metrics.jsonl").write_text("round 0")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job_of(sweep), die)
    assert sweep.reports()[0].status == "stopped"
    assert run_job(job_of(sweep), lambda recipe: finish(recipe, accuracy=0.5)) == 0.5
    assert not (sweep.path / "0_job" / "metrics.jsonl").exists()  # there was no checkpoint


@pytest.mark.slow
def test_a_folder_of_another_job_or_with_another_content_is_not_written_to(sweep):
    run_job(job_of(sweep, 0), lambda recipe: finish(recipe, accuracy=0.5))
    same = job_of(sweep, 4, folder_name="0_job")
    assert run_job(same, not_run) == 0.5  # a job of the same recipe has its figures
    second = job_of(sweep, 1, folder_name="0_job")
    second.seed = 1
    assert run_job(second, not_run) is None
    assert "hydra.sweep.subdir" in sweep.reports()[1].error
    assert read_summary(sweep.path / "0_job")["status"] == "completed"  # the first job's
    third = job_of(sweep, 2)
    (sweep.path / "2_job" / "thesis.tex").touch()
    assert run_job(third, not_run) is None
    assert "is not empty" in sweep.reports()[2].error
    assert [path.name for path in (sweep.path / "2_job").iterdir()] == ["thesis.tex"]
    sweep.ask_to_stop()
    assert run_job(job_of(sweep, 3), not_run) is None
    assert len(sweep.reports()) == 4  # no job begins once the sweep is stopping


@pytest.mark.slow
def test_a_job_that_fails_while_its_sweep_is_stopped_is_stopped(sweep):
    """Its processes may have been ended before it was."""

    def fail(recipe):
        if HydraConfig.get().job.num == 1:
            sweep.ask_to_stop()
        raise LaunchError("its server has died")

    assert [run_job(job_of(sweep, number), fail) for number in (0, 1)] == [None, None]
    assert [job.status for job in sweep.reports()] == ["failed", "stopped"]


@pytest.mark.slow
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
