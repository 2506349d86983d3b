"""Child processes that end with the launcher, however it ends.

Flower and Ray start a dozen processes below the one that the launcher starts, and several of these
lose their parent. So the launcher adopts orphans (Linux), marks everything that it starts with an
inherited environment variable, and searches for both at the end. If SIGKILL ends the launcher, its
:class:`Watchdog` does the same; it runs this module as a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

NOTHING_LEFT = "stopped; nothing of it is left running"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end the launcher
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def exit_text(code: int | None) -> str:
    """Return an exit code in words; Linux kills a process when memory is short."""
    killed = " (killed: was there too little memory?)" if code == -signal.SIGKILL else ""
    return f"exit code {code}{killed}"


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent dies (Linux only).

    Call it in the child, between fork and exec.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


@contextlib.contextmanager
def signals_afterwards(explain: Callable[[], None]) -> Iterator[None]:
    """Delay the signals that would end this process until the block has ended.

    A second signal acts at once. Only the main thread can use it.

    Args:
        explain: says at the first signal what the process waits for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in ENDING}
    came: list[int] = []

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            restore()
            signal.raise_signal(number)
        explain()

    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hold)
    try:
        yield
    finally:
        restore()
        if len(came) == 1:  # also if the block has failed
            signal.raise_signal(came[0])


def start_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start a program in a folder; it ends with this process and does not see Ctrl-C."""
    return subprocess.Popen(
        words,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # the launcher handles the terminal's Ctrl-C
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )


def ray_environment(folder: Path) -> dict[str, str]:
    """Return the environment of our own Ray, which keeps its files in ``folder``."""
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        # actors have an environment of their own, so Ray's spare workers would never be used
        "RAY_prestart_worker_first_driver": "false",
        "SPT_NOENV": "1",  # else the processes' titles overwrite the environment and our mark
    }


class Watchdog:
    """A process that cleans up if its parent dies: it ends processes and removes a folder.

    Args:
        folder: the launch's temporary folder.
        variable, value: as for :class:`ProcessTree`.
    """

    def __init__(self, folder: Path, variable: str, value: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), variable, value],
            stdin=subprocess.PIPE,  # the kernel closes it when the parent dies
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the watchdog, after the parent has cleaned up."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class ProcessTree:
    """All processes of a launch, found by descent and by an environment variable.

    All processes of the launch inherit the variable, and its value is unique to the launch.
    """

    def __init__(self, variable: str, value: str) -> None:
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
                found.add(process)
                with contextlib.suppress(psutil.Error):  # a child may hide its environment
                    found |= set(process.children(recursive=True))
        return {process for process in found if process.pid != os.getpid()}

    def end(self) -> None:
        """End all of them; return when none is left.

        It suspends all before it kills the first: a server that saw a worker die would count a
        failed client and write a round that no resumed run can undo.
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
        """Return the variable's value in a process, None if it has none or cannot be read."""
        try:
            return process.environ().get(self._variable)
        except (psutil.Error, OSError):
            return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal_all(
    processes: Iterable[psutil.Process], action: Callable[[psutil.Process], None]
) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)


if __name__ == "__main__":  # the watchdog
    sys.stdin.buffer.read()
    ProcessTree(*sys.argv[2:]).end()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
