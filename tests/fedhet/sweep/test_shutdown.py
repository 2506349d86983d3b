"""Ending jobs that run in other processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedhet.sweep.shutdown import cancel_slurm_jobs, end_jobs
from fedhet.sweep.sweep_folder import JobReport, SweepFolder

SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@contextmanager
def job(folder: SweepFolder, number: int, program: str) -> Iterator[subprocess.Popen[str]]:
    """Have a process that reports to be a running job, and leave it to the test to end it."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        folder.report(report(number, process.pid, socket.gethostname()))
        try:
            yield process
        finally:
            process.kill()


def report(number: int, pid: int, host: str) -> JobReport:
    return JobReport(number, f"{number}_job", [], "running", 10, began=1.0, pid=pid, host=host)


def test_jobs_on_this_machine_are_asked_once_and_waited_for(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    cleaning_up = "\n".join(
        [
            "import signal, sys, time",
            "asked = []",
            "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))",
            "print('ready', flush=True)",
            "while not asked: time.sleep(0.01)",
            "time.sleep(0.3)",
            "sys.exit(len(asked))",
        ]
    )
    folder.report(report(7, os.getpid(), socket.gethostname()))  # in this process: not by a signal
    folder.report(report(8, 1, "another machine"))
    with job(folder, 0, cleaning_up) as process:
        began = time.monotonic()
        end_jobs(folder)
        assert 0.3 <= time.monotonic() - began < 10.0
        assert process.wait(timeout=1.0) == 1


def test_jobs_that_have_ended_are_left_alone(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    with job(folder, 0, "print('ready', flush=True); import time; time.sleep(60)") as process:
        running = report(0, process.pid, socket.gethostname())
        folder.report(JobReport(**{**vars(running), "status": "completed"}))
        end_jobs(folder)  # a worker that may do another sweep's job by now
        assert process.poll() is None


@pytest.mark.parametrize(("kind", "expected"), [(SLURM, "12 13\n"), ("x.LocalLauncher", "")])
def test_slurm_forgets_the_jobs_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str
) -> None:
    for name in ("12_0", "12_1", "13", "%j", "4x"):
        (tmp_path / "sweep" / ".submitit" / name).mkdir(parents=True)
    called = tmp_path / "called"
    called.touch()
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cancel_slurm_jobs(SweepFolder(tmp_path / "sweep"), {"_target_": kind})
    assert called.read_text() == expected
