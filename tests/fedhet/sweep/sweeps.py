"""Runs a command in a folder, and reads the sweep that it writes below results/."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

FEDHET = str(Path(sys.executable).with_name("fedhet"))


def run_in(cwd, *command):
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def sweep_folder(cwd):
    [path] = (cwd / "results").glob("*_sweep")
    return path


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def statuses(cwd):
    return [job["status"] for job in read_json(sweep_folder(cwd) / "sweep.json")["jobs"]]


def wait_for_rows(cwd, job, jobs=1, rows=1):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list((cwd / "results").glob(f"*/{job}/metrics.jsonl"))
        if len(found) == jobs and all(len(path.read_text().splitlines()) >= rows for path in found):
            return
        time.sleep(0.05)
    pytest.fail(f"{rows} rows did not come; there are {list(cwd.rglob('*'))}")
