"""Runs `fedhet` in a folder, and reads the sweep that it writes below results/."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from fedhet import launch

FEDHET = str(Path(sys.executable).with_name("fedhet"))


def run_in(cwd, *command):
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


@contextmanager
def forked(cwd, *words, run=launch.run):
    """Have `fedhet` in a fork of this process: a new Python would import torch for seconds.

    The yielded object has its pid, and finish(), which returns what subprocess.run would.
    """
    files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]

    def main():
        os.chdir(cwd)
        for number, file in enumerate(files, start=1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        sys.argv, launch.run = ["fedhet", *words], run
        launch.main()

    def finish():
        process.join(timeout=60)
        for file in files:
            file.seek(0)
        printed, errors = (file.read() for file in files)
        return SimpleNamespace(returncode=process.exitcode, stdout=printed, stderr=errors)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    try:
        yield SimpleNamespace(pid=process.pid, finish=finish)
    finally:
        process.kill()
        process.join()
        for file in files:
            file.close()


def fork(cwd, *words, run=launch.run):
    """Return how `fedhet` ended in a fork of this process."""
    with forked(cwd, *words, run=run) as process:
        return process.finish()


def sweep_folder(cwd):
    [path] = (cwd / "results").glob("*_sweep")
    return path


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def statuses(cwd):
    return [job["status"] for job in read_json(sweep_folder(cwd) / "sweep.json")["jobs"]]


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
