"""Ending the jobs of a sweep that run in other processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from fedhet.sweep.sweep_folder import SweepFolder

_PATIENCE_SECONDS = 15.0  # a run that is ended politely ends Flower and Ray, which takes a few


def end_jobs(folder: SweepFolder) -> None:
    """Ask the jobs on this machine to end, and wait until they have cleaned up after themselves."""
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


def leave_ray() -> None:
    """Leave the Ray cluster that hydra/launcher=ray has started or joined: first of all processes.

    Otherwise Ray aborts this process when it sees its raylet gone.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def cancel_slurm_jobs(folder: SweepFolder, launcher: Mapping[str, Any]) -> None:
    """Take the sweep's jobs out of Slurm's queue; submitit keeps a folder for each of them."""
    if not str(launcher.get("_target_")).endswith("SlurmLauncher"):
        return
    names = [path.name for path in (folder.path / ".submitit").glob("*")]
    numbers = sorted(
        {name.partition("_")[0] for name in names if re.fullmatch(r"\d+(_\d+)?", name)}
    )
    scancel = shutil.which("scancel")
    if scancel and numbers:
        subprocess.run([scancel, *numbers], check=False, capture_output=True)


def _running(folder: SweepFolder) -> set[int]:
    """Return the processes of jobs that have not ended."""
    here = socket.gethostname()
    pids = {job.pid for job in folder.reports() if not job.is_over and job.host == here}
    return {pid for pid in pids - {os.getpid()} if _is_alive(pid)}


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
