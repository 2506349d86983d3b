"""Ending jobs that run in other processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fedhet.sweep import shutdown
from fedhet.sweep.shutdown import cancel_slurm_jobs, end_jobs, end_with_launcher, launcher_is_gone
from fedhet.sweep.sweep_folder import JobReport, SweepFolder

CLEANING_UP = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
while not asked: time.sleep(0.01)
time.sleep(0.3)
sys.exit(len(asked))
"""
HERE = socket.gethostname()
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@contextmanager
def job(folder, number):
    """Have a process that reports to be a running job."""
    command = [sys.executable, "-c", CLEANING_UP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        folder.report(report(number, process.pid))
        try:
            yield process
        finally:
            process.kill()


def report(number, pid, host=HERE):
    return JobReport(number, f"{number}_job", [], "running", 10, began=1.0, process=f"{host}:{pid}")


@pytest.mark.slow
def test_jobs_on_this_machine_are_asked_once_and_waited_for(tmp_path):
    folder = SweepFolder(tmp_path)
    folder.report(report(7, os.getpid()))  # in this process: not by a signal
    folder.report(report(8, 1, "another machine"))
    with job(folder, 0) as process, job(folder, 1) as other:
        over = replace(report(1, other.pid), status="completed")
        folder.report(over)  # its worker may have another sweep's job
        end_jobs(folder)
        assert process.poll() == 1  # it has ended, after one signal
        assert other.poll() is None


def test_a_job_ends_when_its_launcher_process_was_killed(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path)
    folder.inner.mkdir()
    monkeypatch.setattr(shutdown, "_POLL_SECONDS", 0.01)
    signals = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    ended = threading.Event()
    monkeypatch.setenv(shutdown.MARK, f"{HERE}:{os.getpid()}")
    threading.Timer(0.1, ended.set).start()
    end_with_launcher(folder, ended)  # it returns with the job, since the launcher lives
    assert not folder.is_stopping()
    with subprocess.Popen([sys.executable, "-c", ""]) as launcher:
        pass
    monkeypatch.setenv(shutdown.MARK, f"another machine:{launcher.pid}")
    assert not launcher_is_gone()
    monkeypatch.setenv(shutdown.MARK, f"{HERE}:{launcher.pid}")
    end_with_launcher(folder, threading.Event())
    assert signals == [signal.SIGTERM]
    assert folder.is_stopping()


@pytest.mark.parametrize(("kind", "expected"), [(SLURM, "12 13\n"), ("x.LocalLauncher", "")])
def test_slurm_forgets_the_jobs_of_the_sweep(tmp_path, monkeypatch, kind, expected):
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
