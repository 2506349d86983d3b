"""Real sweeps by the console command, several runs at once: divided, stopped, resumed."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from fedhet.common.cpus import usable_cpus
from fedhet.common.results import read_rows
from fedhet.conf import fingerprint
from fedhet.sweep.resource_slots import slots_of_machine
from tests.fedhet.sweep.sweeps import fork, job_at, read_json, statuses, sweep_folder, wait_for
from tests.processes import Fork, alive, finish
from tests.recipes import run_recipe

pytestmark = pytest.mark.flower

SMALL = ["task=digits", "clients=4", "local.epochs=1", "strategy=scaffold"]


def rows_of_the_first(cwd):
    return sum(
        len(read_rows(path)) for path in cwd.glob("results/*/scaffold_digits_seed0_*/metrics.jsonl")
    )


def finished(recipe):
    """Be a run that has ended."""
    summary = {"status": "completed", "accuracy": 0.5, "fingerprint": fingerprint(recipe)}
    (Path(recipe.results_dir) / "summary.json").write_text(json.dumps(summary))


def test_submitits_jobs_fail_and_complete(tmp_path):
    pytest.importorskip("submitit", reason="the extra `sweep` is not installed")
    words = [*SMALL, "runtime=local", "rounds=1", "local.momentum=0.9,0"]
    done = fork(tmp_path, "-m", *words, "hydra/launcher=submitit_local")
    assert (done.returncode, done.stderr) == (1, "")
    assert statuses(tmp_path) == ["failed", "completed"]
    assert "strategy.scaffold.option=II reads" in done.stdout
    folder = sweep_folder(tmp_path)
    [failed] = folder.glob("*_momentum0.9_*")
    assert read_json(failed / "summary.json")["status"] == "failed"
    assert not (folder / ".sweep").exists()


@pytest.mark.parametrize("launcher", ["fork", "joblib"])
def test_a_sweep_that_was_stopped_ends_as_if_it_had_not_been(launcher, tmp_path):
    words = [*SMALL, "rounds=20"]
    two = [f"hydra/launcher={launcher}", "hydra.launcher.n_jobs=2"]
    with Fork(tmp_path, "-m", *words, "runtime=local", "seed=0,1", *two) as sweep:
        wait_for(lambda: rows_of_the_first(tmp_path) > 3 and statuses(tmp_path) == ["running"] * 2)
        family = psutil.Process(sweep.pid).children(recursive=True)
        affinities = [set(one.cpu_affinity()) for one in family]
        sweep.send_signal(signal.SIGTERM)
        code, output = finish(sweep)
    assert code == 143
    assert statuses(tmp_path) == ["stopped"] * 2
    assert not alive(family)
    for slot in slots_of_machine(2):  # each job has its part of the CPUs
        assert set(slot.cpus) in affinities
    folder = sweep_folder(tmp_path)
    resumed = fork(tmp_path, "-m", f"--resume={folder}", "seed=0")
    assert resumed.returncode == 0, resumed.stderr + output
    whole = run_recipe(tmp_path / "whole", *words, clients=4)
    first = job_at(tmp_path, "scaffold")
    found = read_json(first / "summary.json")
    assert found["parameters_sha256"] == whole["parameters_sha256"]
    assert "Resuming after round" in (first / "log.txt").read_text()


@pytest.mark.skipif(usable_cpus() < 2, reason="jobs run one after the other on one CPU")
def test_short_rounds_run_beside_each_other_with_the_bits_of_runs_alone_also_after_a_kill(tmp_path):
    words = [*SMALL, "runtime=local", "rounds=20"]
    with Fork(tmp_path, "-m", *words, "seed=0,1") as sweep:
        wait_for(lambda: rows_of_the_first(tmp_path) > 3)
        wait_for(lambda: statuses(tmp_path).count("running") == 2)
        family = psutil.Process(sweep.pid).children(recursive=True)
        part = set(slots_of_machine(2)[0].cpus)  # the second job's; the first has the machine
        wait_for(lambda: part in [set(one.cpu_affinity()) for one in family])
        sweep.kill()
        finish(sweep)
    wait_for(lambda: not alive(family))
    resumed = fork(tmp_path, "-m", f"--resume={sweep_folder(tmp_path)}")
    assert resumed.returncode == 0, resumed.stderr
    assert statuses(tmp_path) == ["completed"] * 2
    for seed in (0, 1):
        alone = run_recipe(tmp_path / f"alone{seed}", *words, f"seed={seed}", clients=4)
        found = read_json(job_at(tmp_path, "scaffold", seed) / "summary.json")
        assert found["parameters_sha256"] == alone["parameters_sha256"]


def test_a_job_whose_process_dies_fails_and_the_others_go_on(tmp_path):
    def run(recipe):
        if recipe.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        finished(recipe)

    done = fork(tmp_path, "-m", "seed=0,1,2", "hydra.launcher.n_jobs=2", run=run)
    assert done.returncode == 1
    assert statuses(tmp_path) == ["completed", "failed", "completed"]
    assert "exit code -9 (killed: was there too little memory?)" in done.stdout
