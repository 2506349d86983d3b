"""Real sweeps by the console command, several runs at once: divided, stopped, resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedhet.sweep.resource_slots import slots_of_machine
from tests.processes import alive

pytestmark = pytest.mark.flower

FEDHET = str(Path(sys.executable).with_name("fedhet"))
SMALL = ["task=digits", "clients=4", "rounds=2", "local.epochs=1", "runtime=local"]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
SUBMITIT = ["hydra/launcher=submitit_local"]


def fedhet(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FEDHET, *words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def sweep_folder(cwd: Path) -> Path:
    [path] = (cwd / "results").glob("*_sweep")
    return path


def jobs_of(cwd: Path) -> list[dict[str, Any]]:
    index = json.loads((sweep_folder(cwd) / "sweep.json").read_text(encoding="utf-8"))
    jobs = index["jobs"]
    assert isinstance(jobs, list)
    return jobs


def summary_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT], ids=["joblib", "submitit"])
def test_jobs_at_once_fail_and_resume_like_one_after_the_other(
    tmp_path: Path, launcher: list[str]
) -> None:
    if importlib.util.find_spec("submitit") is None and launcher is SUBMITIT:
        pytest.skip("the extra `sweep` is not installed")
    words = [*SMALL, "strategy=scaffold", "local.momentum=0.9,0", "seed=0,1"]
    done = fedhet(tmp_path, "-m", *words, *launcher)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert [job["status"] for job in jobs_of(tmp_path)] == ["failed"] * 2 + ["completed"] * 2
    assert "strategy.scaffold.option=II reads" in done.stdout
    assert summary_of(sweep_folder(tmp_path) / "0_scaffold_digits_seed0")["status"] == "failed"
    assert not (sweep_folder(tmp_path) / ".sweep").exists()
    again = fedhet(tmp_path, "-m", "--resume", *words)
    assert again.returncode == 1, again.stderr
    assert again.stdout.count(" 2 rounds, earlier") == 2


def test_a_sweep_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    words = [*SMALL, "rounds=40", "strategy=scaffold", "seed=0,1"]
    with subprocess.Popen(
        [FEDHET, "-m", *words, *JOBLIB], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as sweep:
        _wait_for_round(tmp_path, 5)
        family = psutil.Process(sweep.pid).children(recursive=True)
        affinities = [set(one.cpu_affinity()) for one in family]
        sweep.send_signal(signal.SIGTERM)
        output, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 143
    assert [job["status"] for job in jobs_of(tmp_path)] == ["stopped"] * 2
    assert not alive(family)
    for slot in slots_of_machine(2):  # each job has its part of the CPUs
        assert set(slot.cpus) in affinities
    resumed = fedhet(tmp_path, "-m", f"--resume={sweep_folder(tmp_path)}")
    assert resumed.returncode == 0, resumed.stderr + output
    whole = fedhet(tmp_path, *SMALL, "rounds=40", "strategy=scaffold", "results_dir=whole")
    assert whole.returncode == 0, whole.stderr
    halves = summary_of(sweep_folder(tmp_path) / "0_scaffold_digits_seed0")
    expected = summary_of(tmp_path / "whole")
    assert halves["parameters_sha256"] == expected["parameters_sha256"]
    log = (sweep_folder(tmp_path) / "0_scaffold_digits_seed0" / "log.txt").read_text()
    assert "Resuming after round" in log


def _wait_for_round(cwd: Path, round: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list((cwd / "results").glob("*/*/metrics.jsonl"))
        if len(found) == 2 and all(len(path.read_text().splitlines()) > round for path in found):
            return
        time.sleep(0.1)
    pytest.fail(f"round {round} did not come; there are {os.listdir(cwd)}")
