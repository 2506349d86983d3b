"""Real sweeps by the console command, several runs at once: divided, stopped, resumed."""

import signal

import psutil
import pytest

from fedhet.common.results import read_rows
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


def test_a_sweep_that_was_stopped_ends_as_if_it_had_not_been(tmp_path):
    words = [*SMALL, "rounds=20"]
    joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    with Fork(tmp_path, "-m", *words, "runtime=local", "seed=0,1", *joblib) as sweep:
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
