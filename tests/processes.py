"""Launches of `fedhet` as processes; finding and ending processes."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from omegaconf import DictConfig

from fedhet import launch

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


class Fork:
    """`fedhet` in a fork of this process, to be used as a Popen; it ends with the block.

    A new Python would import torch for seconds. ``run`` takes the place of the launcher's.
    """

    def __init__(
        self,
        cwd: Path,
        *words: str,
        run: Callable[[DictConfig], None] = launch.run,
        **environment: str,
    ) -> None:
        # Files, no pipes: joblib's idle workers keep those open for minutes after its end.
        self._output = tempfile.NamedTemporaryFile()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")
        self.stdout = open(self._output.name, encoding="utf-8")
        self._process = multiprocessing.get_context("fork").Process(
            target=self._main, args=(cwd, words, environment, run)
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._process.join()
        for file in (self.stdout, self._output, self._errors):
            file.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return the rest of its output, and its errors."""
        self._process.join(timeout)
        if timeout is not None and self._process.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, timeout, self.stdout.read())
        self._errors.seek(0)
        return self.stdout.read(), self._errors.read()

    def _main(
        self,
        cwd: Path,
        words: Sequence[str],
        environment: Mapping[str, str],
        run: Callable[[DictConfig], None],
    ) -> None:
        os.chdir(cwd)
        os.environ.update(environment)
        for number in (signal.SIGALRM, signal.SIGTERM):  # of pytest's timeout and of Ray
            signal.signal(number, signal.SIG_DFL)
        os.dup2(self._output.fileno(), 1)
        os.dup2(self._errors.fileno(), 2)
        # As a program may that uses fedhet: objects that close 1 and 2 when they are collected.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        sys.argv, launch.run = ["fedhet", *words], run
        try:
            launch.main()
        finally:  # as an interpreter ends: joblib's workers do now, for which a fork would wait
            threading._shutdown()  # type: ignore[attr-defined]


Launch = subprocess.Popen[str] | Fork


def finish(launch: Launch) -> tuple[int, str]:
    """Wait for the end of a launch; return its exit code and the rest of its output."""
    try:
        output, errors = launch.communicate(timeout=SECONDS)
    finally:
        launch.kill()
    assert launch.returncode is not None
    return launch.returncode, output + (errors or "")


def read_until(launch: Launch, words: str) -> str:
    """Return the output of a launch up to the line with these words."""
    assert launch.stdout is not None
    output = ""
    while words not in output:
        line = launch.stdout.readline()  # part of one, or nothing yet, of a fork's file
        output += line
        assert line or launch.poll() is None, f"it ended without {words!r}: {output}"
        time.sleep(0 if line else 0.02)
    return output


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
