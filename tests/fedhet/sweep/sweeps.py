"""Runs `fedhet` in a folder, and reads the sweep that it writes below results/."""

import json
import time
from types import SimpleNamespace

from fedhet import launch
from tests.processes import Fork


def fork(cwd, *words, run=launch.run):
    """Return how `fedhet` ended in a fork of this process, as subprocess.run would."""
    with Fork(cwd, *words, run=run) as process:
        printed, errors = process.communicate(timeout=60)
        return SimpleNamespace(returncode=process.returncode, stdout=printed, stderr=errors)


def sweep_folder(cwd):
    [path] = (cwd / "results").glob("*_sweep")
    return path


def job_at(cwd, method="fedavg", seed=0):
    [path] = sweep_folder(cwd).glob(f"{method}_digits_seed{seed}_*")
    return path


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def statuses(cwd):
    return [job["status"] for job in read_json(sweep_folder(cwd) / "sweep.json")["jobs"]]


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
