"""The launcher process of a sweep: shows its jobs, keeps sweep.json, and leaves nothing running.

Hydra's callbacks hand nothing to each other, so this module remembers the process's one session.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from fedhet.common.errors import ConfigError
from fedhet.common.files import writable_folder
from fedhet.common.results import COMPLETED, FAILED, LOG, STOPPED
from fedhet.runtimes.processes import ProcessTree, adopt_orphans
from fedhet.sweep.display import closing_summary, display_for
from fedhet.sweep.optuna_search import direction_of, is_search
from fedhet.sweep.plan import SweepPlan
from fedhet.sweep.progress import Snapshot, SweepFollower
from fedhet.sweep.shutdown import MARK, cancel_slurm_jobs, end_jobs, mark
from fedhet.sweep.sweep_folder import Sweep, SweepFolder, timestamp

_POLL_SECONDS = 0.25

# The local runtime forks its server from this process. The child would wait for ever for a lock
# that the display's thread held at that moment, so no fork falls into the drawing.
_DRAWING = threading.RLock()
os.register_at_fork(
    before=_DRAWING.acquire,
    after_in_parent=_DRAWING.release,
    after_in_child=_DRAWING.release,
)


class Session:
    """One call of `fedhet -m`, from the first job to the closing table."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        objective: str,
        sweeper: Mapping[str, Any],
        launcher: Mapping[str, Any],
        plan: SweepPlan,
        *,
        resuming: bool,
    ) -> None:
        self.process = os.getpid()
        self._folder = SweepFolder(folder)
        self._sweeper, self._launcher = sweeper, launcher
        self._lock = _lock(self._folder, resuming=resuming)
        self._earlier = self._folder.jobs() if resuming else {}  # by folder, until they report
        self._jobs: dict[int, dict[str, Any]] = {}  # the entries of sweep.json, by number
        before = self._folder.read() if resuming else None
        varied = [key.lstrip("+") for key in plan.varied]
        self._sweep = Sweep(
            overrides=tuple(overrides),
            began=before.began if before else timestamp(),
            resumed=(*before.resumed, timestamp()) if before else (),
            total=plan.total,
            batch_size=plan.batch_size,
            objective=objective,
            varied=list(dict.fromkeys([*(before.varied if before else ()), *varied])),
        )
        self._follower = SweepFollower(self._folder, plan.total, varied)
        self._snapshot = Snapshot((), plan.total, 0.0)
        self._known: list[tuple[int, str]] = []
        self.all_ended = self._stopped = False  # whether the sweeper has finished, was stopped
        self._closing = threading.Event()
        self._stack = ExitStack()

    def start(self) -> None:
        """Write sweep.json and begin to show the jobs."""
        self._write_index()
        adopt_orphans()
        os.environ[MARK] = mark()
        self._process_tree = ProcessTree(MARK, mark())
        terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        self._console = Console(file=self._stack.enter_context(terminal))
        errors = self._folder.inner / "errors.txt"
        self._stack.enter_context(redirected(self._folder.path / LOG, errors))
        self._display = display_for(self._console)
        self._thread = threading.Thread(target=self._show_until_closed, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let no job begin, and end those that run in other processes; their results stay."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._folder.ask_to_stop()
        finally:  # on a full disk, too
            end_jobs(self._folder)
            cancel_slurm_jobs(self._folder, self._launcher)

    def close(self) -> bool:
        """End what still runs and print the summary; return whether all jobs completed.

        Raises:
            OSError: if sweep.json cannot be written, as on a full disk. Nothing runs any more then.
        """
        self._closing.set()
        self._thread.join(timeout=5.0)
        unexplained = True
        try:
            unexplained = self._conclude()
        finally:  # what is raised can be read where the streams are back
            self._stack.close()
            errors = self._release()
            if unexplained:  # Hydra, the launcher or the sweeper says why
                sys.stderr.write(errors)
        return self._sweep.status == COMPLETED

    def _conclude(self) -> bool:
        """End what still runs and print the summary; return whether nobody asked for that end."""
        try:
            self._update()
        finally:
            over = sum(job.report.is_over for job in self._snapshot.jobs)
            if not self._stopped and self._snapshot.total == over:
                self.all_ended = True  # even if the sweeper failed afterwards
            gave_up = not self.all_ended and not self._stopped
            if not self.all_ended:
                self.stop()
                self._process_tree.end()
        self._update()
        self._finish()
        self._display.close()
        direction = direction_of(self._sweeper) if is_search(self._sweeper) else None
        about = self._folder.path, self._sweep.objective, direction
        self._console.print(closing_summary(self._snapshot, *about), soft_wrap=True)
        return gave_up

    def _show_until_closed(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            with suppress(OSError):  # close() has it again
                self._update()

    def _update(self) -> None:
        with _DRAWING:
            self._snapshot = self._follower.snapshot()
            known = [(job.report.number, job.report.status) for job in self._snapshot.jobs]
            if known != self._known:
                self._known = known
                self._write_index()
            self._display.show(self._snapshot)

    def _write_index(self) -> None:
        for job in self._snapshot.jobs:
            report = job.report
            before = self._jobs.get(report.number) or self._earlier.get(report.folder)
            # A job of an earlier call waits before it knows whether it has to run again. The entry
            # of one that is skipped is right, unless that call was killed before it wrote it.
            right = before is not None and before["status"] == report.status and report.skipped
            if before is None or not (report.status == "waiting" or right):
                before = report.entry()
            self._jobs[report.number] = {**before, "number": report.number}
        jobs = [self._jobs[number] for number in sorted(self._jobs)]
        if not self.all_ended:
            begun = {job["folder"] for job in jobs}
            jobs += [job for folder, job in self._earlier.items() if folder not in begun]
        self._folder.write(self._sweep, jobs)

    def _finish(self) -> None:
        """Write sweep.json for the last time; a job that has not ended counts as stopped."""
        jobs = list(self._snapshot.jobs)
        for number, job in enumerate(jobs):
            if not job.report.is_over:
                jobs[number] = replace(job, report=replace(job.report, status=STOPPED))
        total = len(jobs) if self.all_ended else self._sweep.total
        self._snapshot = replace(self._snapshot, jobs=jobs, total=total)
        good = len(self._snapshot.having(COMPLETED)) == len(jobs)
        status = (COMPLETED if good else FAILED) if self.all_ended else STOPPED
        self._sweep = replace(self._sweep, status=status, ended=timestamp(), total=total)
        self._write_index()

    def _release(self) -> str:
        """Release the folder; return what was printed to stderr."""
        errors = (self._folder.inner / "errors.txt").read_text(encoding="utf-8", errors="replace")
        with suppress(OSError), (self._folder.path / LOG).open("a", encoding="utf-8") as log:
            log.write(errors)  # if there is room on the disk
        os.environ.pop(MARK, None)
        self._folder.clear()
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)
        return errors


def _lock(folder: SweepFolder, *, resuming: bool) -> FileLock:
    """Lock a sweep's folder for this process; refuse one that holds something else."""
    if resuming:
        folder.read()
    elif folder.path.exists() and any(folder.path.iterdir()):
        raise ConfigError(
            f"hydra.sweep.dir={folder.path} is not empty: name another folder, or continue the "
            f"sweep in it: fedhet -m --resume {folder.path}"
        )
    writable_folder(folder.path, "hydra.sweep.dir=")
    lock = FileLock(folder.path / ".sweep.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"another process runs the sweep in {folder.path}") from None
    folder.clear()  # an earlier call may have been killed
    folder.inner.mkdir()
    return lock


@contextmanager
def redirected(output: Path, errors: Path) -> Iterator[None]:
    """Append the output and the errors of this process and its children to two files."""
    with ExitStack() as stack:
        for number, path in ((1, output), (2, errors)):
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            stack.callback(_flush_if_possible)
            _flush()
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
        yield


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _flush_if_possible() -> None:
    with suppress(OSError):  # on a full disk; what is left comes after the old streams are back
        _flush()


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
    """Record that the sweeper has finished."""
    if _current is not None:
        _current.all_ended = True


def stop() -> None:
    """End the jobs of the sweep, if there is one; for signal handlers."""
    if _current is not None and active():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # one is enough
        _current.stop()


def close() -> bool:
    """Close the sweep; return whether all its jobs completed, True if there is none."""
    global _current
    session, _current = _current if active() else None, None
    return True if session is None else session.close()
