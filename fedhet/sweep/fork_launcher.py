"""`hydra/launcher=fork`, the default: each job of a sweep in a process forked from the launcher's.

All jobs share what that process has imported. While rounds are short, a run leaves CPUs idle where
its server works alone, so several jobs run at once, each on its part of the machine
(resource_slots.py). Longer rounds keep all CPUs busy, and jobs run one after the other.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import basic_launcher
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus

from fedhet import signals
from fedhet.common.cpus import usable_cpus
from fedhet.common.errors import DamagedFileError
from fedhet.common.results import FAILED, METRICS, read_rows
from fedhet.plot import warm_up
from fedhet.runtimes.local.run import import_apps
from fedhet.runtimes.processes import exit_text
from fedhet.runtimes.resources import gpu_names
from fedhet.sweep.resource_slots import memory_has_room
from fedhet.sweep.sweep_folder import SweepFolder

_SHORT_SECONDS = 0.5  # of a round
_POLL_SECONDS = 0.1


class ForkLauncher(basic_launcher.BasicLauncher):
    """Hydra's launcher plug-in.

    Args:
        n_jobs: jobs at once; 0: as many as CPUs and memory allow, while rounds are short.
    """

    def __init__(self, n_jobs: int = 0) -> None:
        super().__init__()
        self._n_jobs = n_jobs

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, whose numbers count from ``initial_job_idx``; return what became of each."""
        assert self.config is not None
        on_gpu = bool(gpu_names()) and self.config.device != "cpu"
        most = min(self._n_jobs or (1 if on_gpu else usable_cpus()), len(job_overrides))
        if most <= 1 or sys.platform != "linux":
            return super().launch(job_overrides, initial_job_idx)
        if self.config.runtime.name == "local":
            import_apps()
        waiting = list(enumerate(job_overrides, initial_job_idx))
        running: list[_Job] = []
        ended: dict[int, JobReturn] = {}
        while waiting or running:
            if waiting and self._may_begin(running, most):
                share = most if running or self._n_jobs else 1
                running.append(_Job(self, *waiting.pop(0), share))
                warm_up()  # while the first job starts; the others have it then
            for pipe in wait([job.pipe for job in running], timeout=_POLL_SECONDS):
                (job,) = (job for job in running if job.pipe is pipe)
                running.remove(job)
                ended[job.number] = job.end()
        return [ended[number] for number in sorted(ended)]

    def _may_begin(self, running: Sequence[_Job], most: int) -> bool:
        """Return whether another job may run beside these."""
        if not running:
            return True
        if len(running) >= most:
            return False
        short = all(job.has_short_rounds() for job in running)
        return bool(self._n_jobs) or (short and memory_has_room(tuple(job.pid for job in running)))

    def launch_one(
        self, overrides: Sequence[str], number: int, share: int, pipe: Connection
    ) -> None:
        """Run a job in this process, which was forked for it, on one of ``share`` parts."""
        for one in signals.OF_WORKER:
            signal.signal(one, signals.end_worker)
        try:
            (job,) = super().launch([[*overrides, f"hydra.launcher.n_jobs={share}"]], number)
        except Exception as error:  # its recipe does not compose
            job = JobReturn(status=JobStatus.FAILED, _return_value=error)
        pipe.send(JobReturn(status=job.status, _return_value=job._return_value))


class _Job:
    """A job in a process of its own."""

    def __init__(
        self, launcher: ForkLauncher, number: int, overrides: Sequence[str], share: int
    ) -> None:
        assert launcher.config is not None
        self.number = number
        self._folder = SweepFolder(Path(launcher.config.hydra.sweep.dir))
        self._has_short_rounds = False
        context = multiprocessing.get_context("fork")
        self.pipe, far = context.Pipe(duplex=False)
        arguments = (overrides, number, share, far)
        self._process = context.Process(target=launcher.launch_one, args=arguments)
        self._process.start()
        far.close()

    @property
    def pid(self) -> int:
        """The job's process."""
        assert self._process.pid is not None
        return self._process.pid

    def has_short_rounds(self) -> bool:
        """Return whether the job has begun, and a round of it was short."""
        if not self._has_short_rounds:
            for report in self._reports():
                with suppress(OSError, DamagedFileError):
                    rows = read_rows(self._folder.path / report.folder / METRICS)
                    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
                    self._has_short_rounds = min(seconds, default=1.0) < _SHORT_SECONDS
        return self._has_short_rounds

    def end(self) -> JobReturn:
        """Return what became of the job; report it if its process could not."""
        try:
            job: JobReturn = self.pipe.recv()
        except EOFError:
            job = JobReturn(status=JobStatus.COMPLETED, _return_value=None)
        self._process.join()
        if code := self._process.exitcode:
            error = f"its process ended with {exit_text(code)}"
            for report in self._reports():
                if not report.is_over:
                    self._folder.report(
                        replace(report, status=FAILED, error=error, ended=time.time())
                    )
        return job

    def _reports(self) -> list[Any]:
        return [one for one in self._folder.reports() if one.number == self.number]


def register() -> None:
    """Let Hydra find the launcher: it takes plug-ins from packages of its own names alone."""
    ForkLauncher.__module__ = basic_launcher.__name__
    setattr(basic_launcher, ForkLauncher.__name__, ForkLauncher)
    Plugins.instance().register(ForkLauncher)
