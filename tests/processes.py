"""Launches of `fedhet` as processes; finding and ending processes."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

SECONDS = 600  # the longest wait for what takes half a minute on an idle machine


def start(
    cwd: Path, *words: str, prefix: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, str(Path(sys.executable).with_name("fedhet")), *words],
        cwd=cwd,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(launch: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a launch; return its exit code and the rest of its output."""
    try:
        output, _ = launch.communicate(timeout=SECONDS)
    finally:
        launch.kill()
    return launch.returncode, output


def read_until(launch: subprocess.Popen[str], words: str) -> str:
    """Return the output of a launch up to the line with these words."""
    assert launch.stdout is not None
    output = ""
    for line in launch.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(f"it ended without {words!r}: {output}")


def summary_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes with this value of an environment variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone meanwhile
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill processes until none is found: one may have started another meanwhile."""
    while processes := find():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=5)


def alive(processes: Iterable[psutil.Process]) -> list[str]:
    """Return the names of the running processes; a zombie does not run."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.NoSuchProcess:
            continue
    return found
