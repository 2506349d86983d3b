"""Ends the jobs of a sweep that run in other processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from fedhet.sweep.sweep_folder import SweepFolder

MARK = "FEDHET_SWEEP"  # an environment variable of all processes of a sweep: its launcher process
_PATIENCE_SECONDS = 15.0  # a run that is asked to end needs a few to end Flower and Ray
_POLL_SECONDS = 1.0


def mark() -> str:
    """Return this process as "host:pid", the value of ``MARK`` for the sweep that it launches."""
    return f"{socket.gethostname()}:{os.getpid()}"


def end_jobs(folder: SweepFolder) -> None:
    """Ask the jobs on this machine to end, and wait until they have cleaned up."""
    asked: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pids = _running(folder)
        for pid in pids - asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        asked |= pids
        if not pids:
            return
        time.sleep(0.05)


def end_with_launcher(folder: SweepFolder, job_ended: threading.Event) -> None:
    """Ask this worker process to end if its launcher process is gone before the job ends."""
    while not job_ended.wait(_POLL_SECONDS):
        if launcher_is_gone():
            folder.ask_to_stop()  # the worker may have been handed other jobs
            os.kill(os.getpid(), signal.SIGTERM)
            return


def launcher_is_gone() -> bool:
    """Return whether this process belongs to a sweep whose launcher process here has ended."""
    pid = _pid_here(os.environ.get(MARK, ""))
    return pid is not None and not _is_alive(pid)


def cancel_slurm_jobs(folder: SweepFolder, launcher: Mapping[str, Any]) -> None:
    """Take the sweep's jobs out of Slurm's queue; submitit keeps a folder for each of them."""
    if not str(launcher.get("_target_")).endswith("SlurmLauncher"):
        return
    names = [path.name for path in (folder.path / ".submitit").glob("*")]
    numbers = {name.partition("_")[0] for name in names if re.fullmatch(r"\d+(_\d+)?", name)}
    scancel = shutil.which("scancel")
    if scancel and numbers:
        subprocess.run([scancel, *sorted(numbers)], check=False, capture_output=True)


def _running(folder: SweepFolder) -> set[int]:
    """Return the processes of jobs that have not ended."""
    pids = {_pid_here(job.process) for job in folder.reports() if not job.is_over}
    others = {pid for pid in pids if pid is not None and pid != os.getpid()}
    return set(filter(_is_alive, others))


def _pid_here(process: str) -> int | None:
    """Return the pid of "host:pid"; None of one on another machine."""
    host, _, pid = process.rpartition(":")
    return int(pid) if host == socket.gethostname() else None


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
