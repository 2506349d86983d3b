"""`fedhet -m`: how many jobs a sweep has, and all of it with runs that only pretend."""

import json
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from fedhet.common.results import DIVERGED, write_rows
from fedhet.conf import compose_overrides, fingerprint
from fedhet.conf.composition import composed
from fedhet.runtimes.flower_install import LaunchError
from fedhet.sweep.plan import SweepPlan, plan_sweep
from tests.fedhet.sweep.sweeps import fork, job_at, read_json, statuses, sweep_folder, wait_for
from tests.processes import Fork, finish
from tests.refused import refused

BASIC = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}
SEARCH = {"_target_": "hydra_plugins.a_search.Sweeper", "direction": "maximize"}
SEARCH |= {"n_trials": 20, "n_jobs": 2}


def plan(words, objective, sweeper):
    return plan_sweep(words, objective, sweeper, compose_overrides(()))


def test_a_grid_has_the_product_of_its_values_and_a_search_its_trials():
    words = ["task=digits", "strategy=fedavg,scaffold", "seed=range(3)", "local.lr=0.1"]
    grid = plan(words, "accuracy", BASIC)
    assert (grid.total, grid.batch_size, grid.varied) == (6, 6, ["strategy", "seed"])
    batches = {**BASIC, "max_batch_size": 2}
    assert plan(["seed=0,1,2"], "accuracy", batches).batch_size == 2
    # a typed word replaces that of the experiment file
    sweeper = {**BASIC, "params": {"strategy": "fedavg,scaffold", "seed": "0,1,2"}}
    assert plan(["seed=0"], "accuracy", sweeper) == SweepPlan(2, 2, ["strategy"])
    found = plan(["seed=1", "local.lr=interval(0.01,1)"], "accuracy", SEARCH)
    assert found == SweepPlan(20, 2, ["local.lr"])
    assert plan([], "loss", {**SEARCH, "direction": "minimize"}).total == 20


@pytest.mark.parametrize(
    "word", ["local.lr=0.1,-1", "local.lr=interval(-1,1)", "seed=range(-1,3)", "task=digits,minst"]
)
def test_a_bad_value_anywhere_in_a_sweep_is_refused(word):
    key = word.partition("=")[0]
    with refused(f"{key}="):
        plan([word, "rounds=1,2"], "accuracy", SEARCH)


def test_a_value_that_fits_only_beside_swept_ones_passes():
    words = ["local.epochs=null", "local.steps=1,5", "partition=iid,shards"]
    recipe = composed(("local.epochs=null",))
    assert plan_sweep(words, "accuracy", BASIC, recipe).total == 4


@pytest.mark.parametrize(
    ("words", "objective", "changes", "named"),
    [
        (["+results_dir=x"], "accuracy", {}, "results_dir hydra.sweep.dir"),
        (["resume=true"], "accuracy", {}, "--resume"),
        ([], "loss", {}, "objective=loss direction=minimize"),
        ([], "accuracy", {"storage": "sqlite://"}, "hydra.sweeper.storage=sqlite:// --resume"),
        ([], "accuracy", {"n_jobs": -1}, "hydra.sweeper.n_jobs=-1"),
    ],
)
def test_bad_sweeps_are_refused(words, objective, changes, named):
    with refused(*named.split()):
        plan(words, objective, {**SEARCH, **changes})


# ---- from start to end ---------------------------------------------------------------------------


def pretend(recipe):
    """Be a run in the launcher process: have a figure, or an error, or take long."""
    folder = Path(recipe.results_dir)
    subprocess.run(["echo", "a child says", str(recipe.seed)], check=True)
    trained = {"seconds": 0.1, "bytes_up": 1, "bytes_down": 1, "failures": []}
    accuracies = ((0, 0.1, {}), (1, recipe.local.lr, trained))
    rows = [{"round": t, "accuracy": a, **more} for t, a, more in accuracies]
    write_rows(folder / "metrics.jsonl", rows)
    if recipe.seed == 13:
        raise LaunchError("the run failed: an unlucky seed\nits log: there")
    if recipe.seed == 14:
        raise OSError("disk full")
    if recipe.seed == 15:  # as the ServerApp does
        (folder / "summary.json").write_text('{"status": "failed", "error": "its own"}')
        raise LaunchError("the run failed: its own")
    if recipe.seed == 16:
        about = {"status": DIVERGED, "fingerprint": fingerprint(recipe), "error": "its loss is nan"}
        (folder / "summary.json").write_text(json.dumps(about))
        raise LaunchError("the run diverged: its loss is nan", DIVERGED)
    if recipe.seed == 99:
        time.sleep(60)
    (folder / "seen.txt").write_text(f"{next(iter(recipe.strategy.methods))} {recipe.seed}")
    figures = {"accuracy": recipe.local.lr, "rounds": 1, "fingerprint": fingerprint(recipe)}
    (folder / "summary.json").write_text(json.dumps({"status": "completed", **figures}))


fedhet, begun = partial(fork, run=pretend), partial(Fork, run=pretend)


def index_of(cwd):
    return read_json(sweep_folder(cwd) / "sweep.json")


@pytest.mark.slow
def test_failed_jobs_say_why_the_others_are_kept_and_resuming_runs_what_is_left(tmp_path):
    words = ["-m", "seed=1,13,14,15,16"]
    done = fedhet(tmp_path, *words)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines[:5]] == [f"[{number}/5]" for number in range(1, 6)]
    assert "failed   #1 seed=13: the run failed: an unlucky seed" in lines
    assert "diverged #4 seed=16: the run diverged: its loss is nan" in lines
    assert "a child says" not in done.stdout
    index, ended = index_of(tmp_path), ["completed", *["failed"] * 3, "diverged"]
    assert statuses(tmp_path) == ended
    assert (index["status"], index["total"], index["overrides"]) == ("failed", 5, words[1:])
    folders = [job_at(tmp_path, seed=seed) for seed in (13, 14, 15)]
    unlucky, full, own = (read_json(folder / "summary.json") for folder in folders)
    about = {"strategy": "fedavg", "task": "digits", "seed": 13, "status": "failed"}
    assert unlucky.items() >= {"error": "the run failed: an unlucky seed", **about}.items()
    assert (full["error"], own) == ("OSError: disk full", {"status": "failed", "error": "its own"})
    for folder, error in zip(folders, ("its log: there", "disk full", "its own"), strict=True):
        log = (folder / "log.txt").read_text()
        assert "a child says" in log
        assert error in log
    again = fedhet(tmp_path, "-m", "--resume", *words[1:])
    assert again.returncode == 1
    assert "[1/5] #0 seed=1: 10.00 %, 1 rounds, earlier" in again.stdout
    assert "[5/5] #4 seed=16: diverged: its loss is nan" in again.stdout  # it would do so again
    assert again.stdout.count("earlier") == 3  # a line, and the table
    assert "the run failed: an unlucky seed" in again.stdout
    resumed = index_of(tmp_path)
    assert len(resumed["resumed"]) == 1
    assert resumed["jobs"][0]["began"] == index["jobs"][0]["began"]
    assert statuses(tmp_path) == ended


@pytest.mark.slow
def test_a_sweep_resumed_with_other_values_keeps_what_is_done(tmp_path):
    methods = "strategy=fedavg,fedprox"
    assert fedhet(tmp_path, "-m", methods, "seed=1,2").returncode == 0
    path = sweep_folder(tmp_path)

    def resumed(*words):
        done = fedhet(tmp_path, "-m", f"--resume={path}", *words)
        assert done.returncode == 0, done.stderr
        jobs = index_of(tmp_path)["jobs"]
        for job in jobs:
            has = dict(word.split("=") for word in job["overrides"])
            assert job["folder"].startswith(f"{has['strategy']}_digits_seed{has['seed']}_")
            seen = (path / job["folder"] / "seen.txt").read_text()
            assert seen == f"{has['strategy']} {has['seed']}"
        assert [job["number"] for job in jobs] == list(range(len(jobs)))
        return len(jobs), len(re.findall(r"^\[.*earlier$", done.stdout, re.MULTILINE))

    assert resumed("seed=3,2") == (4, 2)  # some get the numbers of others, some are no more
    assert resumed("seed=1") == (2, 2)  # their results are there
    assert index_of(tmp_path)["varied"] == ["strategy", "seed"]
    assert not (path / "replaced").exists()


@pytest.mark.slow
def test_values_that_a_resumed_run_may_change_tell_jobs_apart_where_they_vary(tmp_path):
    assert fedhet(tmp_path, "-m", "rounds=1,2", "local.lr=0.1,0.2,0.1").returncode == 0
    path, jobs = sweep_folder(tmp_path), index_of(tmp_path)["jobs"]
    found = [folder.name.rpartition("_")[0] for folder in path.glob("fedavg_*")]
    wanted = [f"fedavg_digits_seed0_lr{lr}_rounds{t}" for lr in (0.1, 0.2) for t in (1, 2)]
    assert sorted(found) == wanted
    # a job that has the recipe of an earlier one has its folder and figures
    assert (jobs[0]["folder"], jobs[0]["figures"]) == (jobs[2]["folder"], jobs[2]["figures"])
    assert len({job["folder"] for job in jobs}) == 4
    done = fedhet(tmp_path, "-m", f"--resume={path}", "local.lr=0.1", "rounds=2")
    assert re.search(r"^\[1/1\].*earlier$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_search_proposes_again_what_it_proposed_and_goes_past_failed_trials(tmp_path):
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    words = ["hydra/sweeper=optuna", "local.lr=interval(0.01,1)", "seed=choice(1,13)"]
    first = fedhet(tmp_path, "-m", *words, "hydra.sweeper.n_trials=5")
    assert (first.returncode, first.stderr) == (1, "")
    ended, jobs = statuses(tmp_path), index_of(tmp_path)["jobs"]
    assert (ended[-1], {*ended}) == ("completed", {"completed", "failed"})
    rates = {number: job["figures"].get("accuracy", 0) for number, job in enumerate(jobs)}
    best = max(rates, key=rates.get)
    assert f"best     #{best} accuracy {rates[best]:.6g}: local.lr={rates[best]} " in first.stdout
    folder = sweep_folder(tmp_path)
    more = fedhet(tmp_path, "-m", f"--resume={folder}", "hydra.sweeper.n_trials=6")
    assert more.stdout.count("earlier") == 2 * ended.count("completed")  # lines, and the table's
    again = index_of(tmp_path)["jobs"]
    assert [job["overrides"] for job in again[:5]] == [job["overrides"] for job in jobs]
    assert len(again) == 6


@pytest.mark.slow
def test_a_full_folder_and_an_unknown_option_are_refused_before_the_first_job(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    full = fedhet(tmp_path, "-m", "seed=1,2", "hydra.sweep.dir=full")
    assert (full.returncode, full.stdout, len(full.stderr.splitlines())) == (1, "", 1)
    assert re.search("full is not empty: .*--resume .*/full", full.stderr), full.stderr
    unknown = fedhet(tmp_path, "-m", "strategy=fedavg,fedavgg")
    assert unknown.returncode == 1
    assert "did you mean fedavg" in unknown.stderr
    unset = fedhet(tmp_path, "-m", "seed=1,2", "hydra.sweep.dir=${oc.env:NOBODY_SETS_IT}/x")
    assert "'NOBODY_SETS_IT' not found" in unset.stderr
    assert "Traceback" not in unset.stderr
    together = fedhet(tmp_path, "-m", "clients=3,5", "min_replies=2,4")
    assert re.search(r"job #1 \(clients=3 min_replies=4\): min_replies=4, .* 3 or", together.stderr)
    assert (together.returncode, together.stdout, len(together.stderr.splitlines())) == (1, "", 1)
    assert not (tmp_path / "results").exists()


def in_the_second_job(cwd):
    found = list((cwd / "results").glob("*/*_seed99_*/metrics.jsonl"))
    return found and statuses(cwd) == ["completed", "running"]


@pytest.mark.slow
def test_a_running_sweep_cannot_be_resumed_and_a_stopped_one_keeps_what_was_measured(tmp_path):
    words = ["-m", "seed=1,99,2", "hydra/launcher=basic"]
    with begun(tmp_path, *words) as sweep:
        wait_for(lambda: in_the_second_job(tmp_path))
        second = fedhet(tmp_path, *words, "--resume")
        assert second.returncode == 1
        assert "another process runs the sweep" in second.stderr
        sweep.send_signal(signal.SIGINT)
        code, printed = finish(sweep)
    assert code == 130
    assert "[1/3] #0 seed=1: 10.00 %, 1 rounds" in printed
    assert "continue fedhet -m --resume " in printed
    assert index_of(tmp_path)["status"] == "stopped"
    assert statuses(tmp_path) == ["completed", "stopped"]
    assert not (sweep_folder(tmp_path) / ".sweep").exists()


@pytest.mark.slow
def test_a_sweep_that_was_killed_can_be_resumed(tmp_path):
    with begun(tmp_path, "-m", "seed=1,99"):
        wait_for(lambda: in_the_second_job(tmp_path))
    index = sweep_folder(tmp_path) / "sweep.json"
    content = json.loads(index.read_text())  # as if it was killed before it wrote the job's end
    content["jobs"][0] |= {"status": "running", "figures": {}}
    index.write_text(json.dumps(content))
    last = fedhet(tmp_path, "-m", f"--resume={sweep_folder(tmp_path)}", "seed=1")
    assert last.returncode == 0, last.stderr
    assert "earlier" in last.stdout
    job = index_of(tmp_path)["jobs"][0]
    assert (job["status"], job["figures"]["rounds"]) == ("completed", 1)
