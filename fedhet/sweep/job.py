"""One job of a sweep, in whatever process a Hydra launcher runs it.

Errors are caught and reported here, so that every launcher and sweeper sees a job that has ended.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, read_write

from common.results import write_summary
from conf import method_name
from fedhet.runtimes.flower_install import LaunchError
from fedhet.runtimes.resources import MOST_CLIENTS_A_GPU
from fedhet.sweep import session
from fedhet.sweep.optuna_search import FIGURES
from fedhet.sweep.plain import plain
from fedhet.sweep.resource_slots import Slot, free_slot, jobs_at_once, machine_for, parts
from fedhet.sweep.resume import Plan, make_ready, plan_for, read_summary
from fedhet.sweep.streams import words_to
from fedhet.sweep.sweep_folder import FolderTaken, JobReport, Sweep, SweepFolder

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Run = Callable[[DictConfig], object]


def run_job(recipe: DictConfig, run: Run) -> float | None:
    """Run one job: skip, continue or begin it, on its part of the machine; its words go to its log.

    Args:
        recipe: the job's recipe.
        run: what runs a recipe from start to end.

    Returns:
        The objective, for a sweeper that optimises it; None if the job failed or has not measured
        it, which is a failed trial.
    """
    job = HydraConfig.get()
    sweep_folder = SweepFolder(Path(job.sweep.dir))
    if sweep_folder.is_stopping():
        return None
    folder = Path(job.runtime.output_dir).absolute()
    report = JobReport(
        number=int(job.job.num),
        folder=folder.name,
        overrides=[str(word) for word in job.overrides.task],
        status="waiting",
        rounds=int(recipe.rounds),
        began=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    report = _Attempt(sweep_folder, folder, recipe, report).carry_out(run)
    return report.figures.get(sweep_folder.read().objective)


class _Attempt:
    """One attempt at a job, which reports where it stands."""

    def __init__(
        self, sweep_folder: SweepFolder, folder: Path, recipe: DictConfig, report: JobReport
    ) -> None:
        self._sweep_folder, self._folder = sweep_folder, folder
        self._recipe, self._report = recipe, report

    def carry_out(self, run: Run) -> JobReport:
        """Return the report of the ended job."""
        with _leaving_at_signals():
            try:
                self._measure(run)
            except Exception as error:
                self._say(status="failed", error=_reason(error), ended=time.time())
                if not isinstance(error, FolderTaken):
                    _write_failure(self._folder, self._recipe, self._report)
            except BaseException:  # Ctrl-C, SIGTERM: --resume goes on with it
                self._say(status="stopped", ended=time.time())
                raise
        return self._report

    def _measure(self, run: Run) -> None:
        sweep = self._sweep_folder.read()
        plan = self._plan(sweep)
        if plan is not Plan.SKIP:
            self._say()
            make_ready(self._folder, plan)
            with _logged(self._folder), self._slot(sweep) as slot:
                keep_to(slot, self._recipe)
                self._say(status="running", began=time.time())
                _begin(self._recipe, self._folder, plan)
                run(self._recipe)
        figures = figures_of(read_summary(self._folder))
        skipped = plan is Plan.SKIP
        self._say(status="completed", figures=figures, skipped=skipped, ended=time.time())

    def _plan(self, sweep: Sweep) -> Plan:
        again = self._sweep_folder.claim(self._folder.name, self._report.number)
        if again or sweep.resumed:
            return plan_for(self._folder, self._recipe)
        if any(self._folder.iterdir()):
            raise FolderTaken(f"{self._folder} is not empty, and this sweep has not written it")
        return Plan.AFRESH

    @contextmanager
    def _slot(self, sweep: Sweep) -> Iterator[Slot | None]:
        launcher = plain(HydraConfig.get().launcher)
        machine = machine_for(launcher)
        at_once = jobs_at_once(launcher, sweep.together, machine.quota)
        if at_once == 1:
            yield None
            return
        with free_slot(self._sweep_folder.inner / "slots", parts(machine, at_once)) as slot:
            yield slot

    def _say(self, **news: Any) -> None:
        self._report = replace(self._report, **news)
        self._sweep_folder.report(self._report)


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a summary.json; what was not measured is left out."""
    measured = {key: summary[key] for key in FIGURES if summary.get(key) is not None}
    return {key: value for key, value in measured.items() if math.isfinite(value)}


def _begin(recipe: DictConfig, folder: Path, plan: Plan) -> None:
    """Say in the recipe, and in the words that the apps compose it from, where and how it runs."""
    recipe.results_dir = str(folder)
    if plan is Plan.CONTINUE:
        recipe.resume = True
        job: Any = HydraConfig.get()
        with read_write(job.overrides.task):
            job.overrides.task.append("resume=true")


def keep_to(slot: Slot | None, recipe: DictConfig) -> None:
    """Say in the recipe what the job has of the machine: Ray does not look at CPU affinity."""
    if slot is None:
        return
    runtime = recipe.runtime
    if slot.num_cpus < int(runtime.client_cpus):
        raise ValueError(
            f"runtime.client_cpus={runtime.client_cpus}, but so many jobs at once leave each "
            f"{slot.num_cpus} of this machine's CPUs: run fewer (hydra.launcher.n_jobs), or set "
            f"runtime.client_cpus={slot.num_cpus}"
        )
    runtime.num_cpus = min(int(runtime.num_cpus or slot.num_cpus), slot.num_cpus)
    if runtime.client_gpus is None and slot.jobs_per_gpu > 1:
        clients_at_once = max(1, runtime.num_cpus // int(runtime.client_cpus))
        share = max(1 / clients_at_once, slot.jobs_per_gpu / MOST_CLIENTS_A_GPU)
        runtime.client_gpus = int(min(1.0, share) * 10_000) / 10_000


def _reason(error: Exception) -> str:
    words = str(error).partition("\nits log: ")[0]
    return words if isinstance(error, LaunchError) else f"{type(error).__name__}: {words}"


def _write_failure(folder: Path, recipe: DictConfig, report: JobReport) -> None:
    """Leave a summary.json in the job's folder, unless the ServerApp has written why it failed."""
    summary = read_summary(folder)
    written = (folder / "summary.json").stat().st_mtime if summary else 0.0
    if written >= report.began or not folder.exists() or summary.get("status") == "completed":
        return
    about = {
        "strategy": method_name(recipe),
        "task": recipe.task.name,
        "model": recipe.task.model,
        "partition": recipe.partition.name,
        "clients": recipe.clients,
        "seed": recipe.seed,
    }
    words = {**about, **summary, "status": "failed", "error": report.error}
    write_summary(folder, words)


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Let all that the run says, and why it fails, go to its log: the terminal is the sweep's."""
    with words_to(folder / "log.txt", folder / "log.txt"):
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise


@contextmanager
def _leaving_at_signals() -> Iterator[None]:
    """In a worker process: let the run clean up after itself when the sweep ends.

    The launcher process has answers of its own, and they stay.
    """
    if session.active() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # one is enough, and what follows cleans up
    sys.exit(128 + number)
