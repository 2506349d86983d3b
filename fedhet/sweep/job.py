"""One job of a sweep, in whatever process a Hydra launcher runs it.

Errors are caught and reported here, so every launcher and sweeper sees a job that has ended.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, read_write

from fedhet import signals
from fedhet.common.cpus import usable_cpus
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.metrics import METRICS, OWN, figures_of
from fedhet.common.results import (
    COMPLETED,
    DIVERGED,
    FAILED,
    LOG,
    STOPPED,
    read_summary_or_empty,
    write_end,
)
from fedhet.conf import identity, plain_part, words_of
from fedhet.conf.schema import FIGURES
from fedhet.runtimes.flower_install import LaunchError
from fedhet.runtimes.processes import end_with_parent
from fedhet.sweep import job_folder as job_folder  # gives Hydra ${job_folder:}
from fedhet.sweep import resource_slots, session
from fedhet.sweep.resume import FolderTaken, Plan, make_ready, plan_for
from fedhet.sweep.shutdown import end_with_launcher, launcher_is_gone, mark
from fedhet.sweep.sweep_folder import JobReport, Sweep, SweepFolder

Run = Callable[[DictConfig], object]
_POLL_SECONDS = 0.25


def run_job(recipe: DictConfig, run: Run) -> float | None:
    """Skip, continue or begin one job; return its objective, None if it has none (it failed)."""
    job = HydraConfig.get()
    sweep_folder = SweepFolder(Path(job.sweep.dir))
    if sweep_folder.is_stopping():
        return None
    folder = Path(job.runtime.output_dir).absolute()
    report = _Attempt(sweep_folder, folder, recipe).carry_out(run)
    return report.figures.get(sweep_folder.read().objective)


class _Attempt:
    """One attempt at a job, which reports its status."""

    def __init__(self, sweep_folder: SweepFolder, folder: Path, recipe: DictConfig) -> None:
        self._sweep_folder, self._folder, self._recipe = sweep_folder, folder, recipe
        job = HydraConfig.get()
        self._report = JobReport(
            number=int(job.job.num),
            folder=folder.name,
            overrides=words_of(job.overrides.task),
            status="waiting",
            rounds=int(recipe.rounds),
            began=time.time(),
            process=mark(),
        )

    def carry_out(self, run: Run) -> JobReport:
        """Return the report of the ended job."""
        with _ending_politely(self._sweep_folder):
            try:
                self._carry_out(run)
            except Exception as error:
                status, reason = getattr(error, "status", FAILED), _reason(error)
                if status == FAILED and self._sweep_folder.is_stopping():
                    status = STOPPED  # its processes may have been ended before it was asked to
                self._report_status(status=status, error=reason, ended=time.time())
                if self._folder.exists() and not isinstance(error, FolderTaken):
                    with suppress(DamagedFileError):  # which is the reason, then
                        write_end(self._folder, identity(self._recipe), status, reason)
            except BaseException:  # Ctrl-C, SIGTERM: --resume continues it
                self._report_status(status=STOPPED, ended=time.time())
                raise
        return self._report

    def _carry_out(self, run: Run) -> None:
        sweep = self._sweep_folder.read()
        plan = self._plan(sweep)
        if plan is not Plan.SKIP:
            make_ready(self._folder, plan)
            with _logged(self._folder), self._own_slot(sweep):
                self._report_status(status="running", began=time.time())
                self._recipe.results_dir = str(self._folder)
                if plan is Plan.CONTINUE:
                    _resume(self._recipe)
                run(self._recipe)
        summary = read_summary_or_empty(self._folder)
        names = (*FIGURES, *figures_of([*METRICS, *summary.get(OWN, ())]))
        measured = {key: summary[key] for key in names if summary.get(key) is not None}
        figures = {key: value for key, value in measured.items() if math.isfinite(value)}
        diverged = summary.get("status") == DIVERGED  # in an earlier call
        self._report_status(
            status=DIVERGED if diverged else COMPLETED,
            error=str(summary.get("error", "")) if diverged else "",
            figures={} if diverged else figures,
            began=None if plan is Plan.SKIP else self._report.began,
            ended=time.time(),
        )

    def _plan(self, sweep: Sweep) -> Plan:
        number = self._report.number
        before = {one.number for one in self._sweep_folder.reports()}
        self._report_status()
        if (holder := self._sweep_folder.claim(self._folder.name, number)) != number:
            return self._plan_beside(holder)
        if number in before or sweep.resumed:  # or a cluster has restarted it
            return plan_for(self._folder, self._recipe)
        if any(self._folder.iterdir()):
            raise FolderTaken(f"{self._folder} is not empty, and this sweep did not write it")
        return Plan.RESTART

    def _plan_beside(self, holder: int) -> Plan:
        """Wait for the job that has the folder: a job of the same recipe has its results, too."""
        while not self._sweep_folder.is_stopping():
            if any(one.is_over for one in self._sweep_folder.reports() if one.number == holder):
                break
            time.sleep(_POLL_SECONDS)
        if plan_for(self._folder, self._recipe) is not Plan.SKIP:
            raise FolderTaken(f"{self._folder} is the folder of job #{holder}, which has failed")
        return Plan.SKIP

    @contextmanager
    def _own_slot(self, sweep: Sweep) -> Iterator[None]:
        """Keep to a part of the machine, if jobs run at once."""
        job: Any = HydraConfig.get()
        launcher = plain_part(job, "launcher")
        cpus = usable_cpus()
        at_once = resource_slots.jobs_at_once(launcher, sweep.batch_size, cpus)
        if at_once == 1:
            yield
            return
        slots = resource_slots.slots_of_machine(at_once)
        with resource_slots.free_slot(self._sweep_folder.inner / "slots", slots) as slot:
            resource_slots.limit_recipe(self._recipe, slot)
            yield

    def _report_status(self, **news: Any) -> None:
        self._report = replace(self._report, **news)
        self._sweep_folder.report(self._report)


def _resume(recipe: DictConfig) -> None:
    """Set resume=true, for the launcher and for the apps."""
    recipe.resume = True
    job: Any = HydraConfig.get()
    with read_write(job.overrides.task):
        job.overrides.task.append("resume=true")


def _reason(error: Exception) -> str:
    words = str(error).partition("\nits log: ")[0]
    is_for_user = isinstance(error, (ConfigError, LaunchError))
    return words if is_for_user else f"{type(error).__name__}: {words}"


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Send all output of the run, and its traceback, to its log."""
    with session.redirected(folder / LOG, folder / LOG):
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise


@contextmanager
def _ending_politely(folder: SweepFolder) -> Iterator[None]:
    """In a worker process, let the run clean up when a signal, or the launcher's death, ends it.

    The launcher process has signal handlers of its own.
    """
    if session.active() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signals.end_worker) for number in signals.OF_WORKER}
    end_with_parent()  # an idle worker, too
    ended = threading.Event()
    threading.Thread(target=end_with_launcher, args=(folder, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signals.forget()
        for number, handler in before.items():
            signal.signal(number, handler)
        if launcher_is_gone():
            os._exit(128 + signal.SIGTERM)  # nobody waits for the worker
