"""The launcher process of a sweep: shows its jobs, keeps sweep.json, and leaves nothing running.

There is one sweep at most in a process, and Hydra's callbacks hand nothing back: hence a module
that remembers it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedhet.runtimes.processes import ProcessTree, adopt_orphans
from fedhet.sweep.display import display_for, sweep_console
from fedhet.sweep.optuna_search import direction_of, is_search
from fedhet.sweep.plan import Survey
from fedhet.sweep.progress import Snapshot, Watch
from fedhet.sweep.shutdown import cancel_slurm_jobs, end_jobs, leave_ray
from fedhet.sweep.streams import own_stdout, words_to
from fedhet.sweep.summary import closing
from fedhet.sweep.sweep_folder import Sweep, SweepFolder, SweepRefused, timestamp
from fedhet.sweep.watchdog import MARK, SweepGuard

_POLL_SECONDS = 0.25

# The local engine forks its server from this process. A child of a fork that fell into the middle
# of a picture would find locks held for ever by a thread that it does not have.
_DRAWING = threading.RLock()
os.register_at_fork(
    before=_DRAWING.acquire,
    after_in_parent=_DRAWING.release,
    after_in_child=_DRAWING.release,
)


class Session:
    """One call of `fedhet -m`, from the first job to the closing table.

    Args:
        folder: of the sweep.
        words: the overrides as they were typed.
        objective: the figure that a search optimises.
        nodes: hydra.sweeper and hydra.launcher, as plain values.
        ahead: what the sweep will be.
        resuming: whether ``--resume`` was given.

    Raises:
        SweepRefused: if the folder holds something else.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        objective: str,
        nodes: Mapping[str, Mapping[str, Any]],
        ahead: Survey,
        *,
        resuming: bool,
    ) -> None:
        self.process = os.getpid()
        self._folder = SweepFolder(folder)
        self._sweeper, self._launcher = nodes["sweeper"], nodes["launcher"]
        self._lock = _own(self._folder, resuming=resuming)
        self._entries = self._folder.entries() if resuming else {}
        before = self._folder.read() if resuming else None
        self._sweep = Sweep(
            overrides=tuple(words),
            began=before.began if before else timestamp(),
            resumed=(*before.resumed, timestamp()) if before else (),
            total=ahead.total,
            together=ahead.together,
            objective=objective,
        )
        self._watch = Watch(self._folder, ahead.total, ahead.varied)
        self._snapshot = Snapshot((), ahead.total, 0.0)
        self._known: list[tuple[int, str]] = []
        self._all_ended = self._stopped = False
        self._closing = threading.Event()
        self._stack = ExitStack()

    def start(self) -> None:
        """Write sweep.json and begin to show the jobs."""
        self._folder.write(self._sweep, self._entries)
        adopt_orphans()
        guard = SweepGuard(self._folder.path)
        self._process_tree = ProcessTree(MARK, str(self._folder.path))
        os.environ[MARK] = str(self._folder.path)
        self._stack.callback(guard.dismiss)
        self._console = sweep_console(self._stack.enter_context(own_stdout()))
        errors = self._folder.inner / "errors.txt"
        self._stack.enter_context(words_to(self._folder.path / "log.txt", errors))
        self._display = display_for(self._console)
        self._thread = threading.Thread(target=self._show_until_closed, daemon=True)
        self._thread.start()

    def jobs_ended(self) -> None:
        """Take note that the sweeper has come to its end."""
        self._all_ended = True

    def stop(self) -> None:
        """Let no job begin, and end those that run in other processes; what they measured stays."""
        if self._stopped:
            return
        self._stopped = True
        self._folder.ask_to_stop()
        end_jobs(self._folder)
        cancel_slurm_jobs(self._folder, self._launcher)

    def close(self) -> bool:
        """End what still runs, show how it all ended, and leave the terminal as it was.

        Returns:
            Whether all jobs completed.
        """
        self._closing.set()
        self._thread.join(timeout=5.0)
        self._look()
        if not self._stopped and self._snapshot.total == len(self._snapshot.over):
            self._all_ended = True  # though the sweeper may have thought better of it since
        of_itself = not self._all_ended and not self._stopped
        if not self._all_ended:
            self.stop()
            leave_ray()
            self._process_tree.end()
            self._look()
        self._finish()
        self._display.close()
        direction = direction_of(self._sweeper) if is_search(self._sweeper) else None
        shown = closing(self._snapshot, self._folder.path, self._sweep.objective, direction)
        self._console.print(shown, soft_wrap=True)
        self._stack.close()
        words = self._let_go()
        if of_itself:  # why Hydra, the launcher or the sweeper has given up
            sys.stderr.write(words)
        return self._sweep.status == "completed"

    def _show_until_closed(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        with _DRAWING:
            self._snapshot = self._watch.look()
            known = [(job.report.number, job.report.status) for job in self._snapshot.jobs]
            if known != self._known:
                self._known = known
                self._update_index()
            self._display.show(self._snapshot)

    def _update_index(self) -> None:
        for job in self._snapshot.jobs:
            if not (job.report.skipped and job.report.number in self._entries):
                self._entries[job.report.number] = job.report.entry()
        self._folder.write(self._sweep, self._entries)

    def _finish(self) -> None:
        """Write sweep.json for the last time; a job whose process is gone has been stopped."""
        jobs = [
            job
            if job.report.is_over
            else replace(job, report=replace(job.report, status="stopped"))
            for job in self._snapshot.jobs
        ]
        total = len(jobs) if self._all_ended else self._sweep.total  # a grid may have fewer
        self._snapshot = replace(self._snapshot, jobs=jobs, total=total)
        good = len(self._snapshot.having("completed")) == len(jobs)
        status = ("completed" if good else "failed") if self._all_ended else "stopped"
        self._sweep = replace(self._sweep, status=status, ended=timestamp(), total=total)
        self._update_index()

    def _let_go(self) -> str:
        """Leave the folder; returns what has gone to stderr."""
        errors = self._folder.inner / "errors.txt"
        words = errors.read_text(encoding="utf-8", errors="replace")
        with (self._folder.path / "log.txt").open("a", encoding="utf-8") as log:
            log.write(words)
        os.environ.pop(MARK, None)
        self._lock.release()
        self._folder.clear()
        return words


def _own(folder: SweepFolder, *, resuming: bool) -> FileLock:
    """Take a sweep's folder for this process.

    Raises:
        SweepRefused: if another process has it, or it holds something else.
    """
    if resuming:
        folder.read()
    elif folder.path.exists() and any(folder.path.iterdir()):
        raise SweepRefused(
            f"hydra.sweep.dir={folder.path} is not empty: name another, or go on with the sweep in "
            f"it by: fedhet -m --resume {folder.path}"
        )
    folder.inner.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.inner / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise SweepRefused(f"another process runs the sweep in {folder.path}") from None
    folder.forget_reports()
    return lock


_current: Session | None = None


def active() -> bool:
    """Return whether this is the launcher process of a sweep, not one forked from it."""
    return _current is not None and _current.process == os.getpid()


def start(session: Session) -> None:
    """Begin a sweep in this process."""
    global _current
    session.start()
    _current = session


def jobs_ended() -> None:
    """Take note that the sweeper has come to its end."""
    if _current is not None:
        _current.jobs_ended()


def stop() -> None:
    """End the jobs of the sweep, if there is one; for the answers to signals."""
    if _current is not None and active():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # one is enough, and what follows has an end
        _current.stop()


def close() -> bool:
    """Close the sweep, if there is one.

    Returns:
        Whether all its jobs completed; True without a sweep.
    """
    global _current
    session, _current = _current if active() else None, None
    return True if session is None else session.close()
