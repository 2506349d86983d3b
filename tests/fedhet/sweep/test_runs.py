"""Real sweeps by the console command, several runs at once: divided, stopped, resumed."""

from __future__ import annotations

import importlib.util
import signal
import subprocess

import psutil
import pytest

from fedhet.sweep.resource_slots import slots_of_machine
from tests.fedhet.sweep.sweeps import (
    FEDHET,
    read_json,
    run_in,
    statuses,
    sweep_folder,
    wait_for_rows,
)
from tests.processes import alive

pytestmark = pytest.mark.flower

SMALL = ["task=digits", "clients=4", "rounds=2", "local.epochs=1", "runtime=local"]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
SUBMITIT = ["hydra/launcher=submitit_local"]
FIRST = "0_scaffold_digits_seed0"


@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT], ids=["joblib", "submitit"])
def test_jobs_at_once_fail_and_resume_like_one_after_the_other(tmp_path, launcher):
    if importlib.util.find_spec("submitit") is None and launcher is SUBMITIT:
        pytest.skip("the extra `sweep` is not installed")
    words = [*SMALL, "strategy=scaffold", "local.momentum=0.9,0", "seed=0,1"]
    done = run_in(tmp_path, FEDHET, "-m", *words, *launcher)
    assert (done.returncode, done.stderr) == (1, "")
    assert statuses(tmp_path) == ["failed"] * 2 + ["completed"] * 2
    assert "strategy.scaffold.option=II" in done.stdout
    folder = sweep_folder(tmp_path)
    assert read_json(folder / FIRST / "summary.json")["status"] == "failed"
    assert not (folder / ".sweep").exists()
    again = run_in(tmp_path, FEDHET, "-m", "--resume", *words)
    assert again.returncode == 1, again.stderr
    assert again.stdout.count(" 2 rounds, earlier") == 2


def test_a_sweep_that_was_stopped_ends_as_if_it_had_not_been(tmp_path):
    words = [*SMALL, "rounds=40", "strategy=scaffold"]
    with subprocess.Popen(
        [FEDHET, "-m", *words, "seed=0,1", *JOBLIB], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as sweep:
        wait_for_rows(tmp_path, "*", jobs=2, rows=6)
        family = psutil.Process(sweep.pid).children(recursive=True)
        affinities = [set(one.cpu_affinity()) for one in family]
        sweep.send_signal(signal.SIGTERM)
        output, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 143
    assert statuses(tmp_path) == ["stopped"] * 2
    assert not alive(family)
    for slot in slots_of_machine(2):  # each job has its part of the CPUs
        assert set(slot.cpus) in affinities
    folder = sweep_folder(tmp_path)
    resumed = run_in(tmp_path, FEDHET, "-m", f"--resume={folder}")
    assert resumed.returncode == 0, resumed.stderr + output
    whole = run_in(tmp_path, FEDHET, *words, "results_dir=whole")
    assert whole.returncode == 0, whole.stderr
    halves, expected = (
        read_json(path / "summary.json")["parameters_sha256"]
        for path in (folder / FIRST, tmp_path / "whole")
    )
    assert halves == expected
    assert "Resuming after round" in (folder / FIRST / "log.txt").read_text()
