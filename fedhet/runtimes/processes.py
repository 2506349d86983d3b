"""Child processes that end with the launcher, however it ends.

Flower and Ray start some dozen processes below the one SuperLink that the launcher starts, several
of which leave their parent. So the launcher adopts orphans (Linux), marks all that it starts with
an environment variable that is inherited, and at the end looks for both. For the end that it cannot
see coming, SIGKILL, it has a guard: this module as a process, which waits for the launcher to be
gone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

NOTHING_LEFT = "stopped; nothing of it is left running"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to end this process when its parent dies, even by SIGKILL (Linux only).

    Runs in the child between fork and exec.

    Args:
        number: of the signal that ends it.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def ray_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a Ray of our own, which keeps its files in ``folder``."""
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        # the actors have an environment of their own: Ray's spare workers are never used
        "RAY_prestart_worker_first_driver": "false",
        "SPT_NOENV": "1",  # or the titles of its processes overwrite the environment, and the mark
    }


class Watchdog:
    """A process that ends a launch's processes and removes its folder if its own parent cannot.

    Its parent is the launcher, or with Ray the server.
    """

    def __init__(self, folder: Path, variable: str, value: str) -> None:
        """Start it.

        Args:
            folder: the launch's temporary folder.
            variable: as for :class:`ProcessTree`.
            value: as for :class:`ProcessTree`.
        """
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), variable, value],
            stdin=subprocess.PIPE,  # closed by the kernel when the parent dies
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it, after the parent has cleaned up by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class ProcessTree:
    """The processes that a launch brings about: known by descent and by a marked environment."""

    def __init__(self, variable: str, value: str) -> None:
        """Remember whom not to end, and how to know the others.

        Args:
            variable: an environment variable that all processes of the launch inherit.
            value: what it is set to; no other launch uses the same value.
        """
        self._variable = variable
        self._value = value
        self._others = set(psutil.Process().children(recursive=True))

    def members(self) -> set[psutil.Process]:
        """Return the launch's processes that are alive now."""
        found = {
            process  # an orphan that this process adopted may be another launch's
            for process in set(psutil.Process().children(recursive=True)) - self._others
            if self._mark(process) in (None, self._value)
        }
        for process in psutil.process_iter():
            if self._mark(process) == self._value:
                found |= {process, *_descendants(process)}  # one may hide its environment
        return {process for process in found if process.pid != os.getpid()}

    def end(self) -> None:
        """End all of them. Returns when none is left.

        They are all stopped before the first is killed: a server that saw a worker die would take
        that for a failed client, and write down a round that no resumed run can undo.
        """
        known: set[psutil.Process] = set()
        while new := self.members() - known:  # one may have started another meanwhile
            _signal_all(new, psutil.Process.suspend)
            known |= new
        for _ in range(20):
            _signal_all(known, psutil.Process.kill)
            psutil.wait_procs(known, timeout=1.0)
            known = {process for process in known | self.members() if _is_alive(process)}
            if not known:
                return

    def _mark(self, process: psutil.Process) -> str | None:
        """Return what the process is marked with, None if with nothing that can be read."""
        try:
            return process.environ().get(self._variable)
        except (psutil.Error, OSError):  # another user's, or gone meanwhile
            return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _signal_all(
    processes: Iterable[psutil.Process], action: Callable[[psutil.Process], None]
) -> None:
    for process in processes:
        try:
            action(process)
        except psutil.NoSuchProcess:
            continue


def _watchdog(folder: str, variable: str, value: str) -> None:
    sys.stdin.buffer.read()
    ProcessTree(variable, value).end()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watchdog(*sys.argv[1:])
