"""How a terminal, or a log, shows a running sweep, and the summary at its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fedhet.common.results import COMPLETED, DIVERGED, FAILED
from fedhet.progress import percent
from fedhet.sweep.optuna_search import best_of
from fedhet.sweep.progress import Job, Snapshot

_HEARTBEAT_SECONDS = 60.0
_OTHER_LINES = 4  # of the terminal, beside the running jobs'
_REASON_WIDTH = 80


class LiveDisplay:
    """Progress bars of the sweep and of each running job, from the first job's start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        whole_width = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=whole_width),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[figures]}", justify="right"),
            console=console,
            auto_refresh=False,  # would need another thread
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        self._all = self._bars.add_task("", total=1.0, figures="")
        self._tasks: dict[int, TaskID] = {}
        self._failed: set[int] = set()

    def show(self, snapshot: Snapshot) -> None:
        """Draw the bars again, and print jobs that have failed above them."""
        if not snapshot.jobs:
            return  # an error of the launcher may come first
        self._bars.start()
        for job in snapshot.having(FAILED, DIVERGED):
            if job.report.number not in self._failed:
                self._failed.add(job.report.number)
                line = Text(f"{job.report.status:8} {job.title}: {job.report.error}", style="red")
                line.truncate(self._console.width, overflow="ellipsis")  # in full at the end
                self._console.print(line)
        most = max(1, self._console.height - _OTHER_LINES)
        shown = {job.report.number: job for job in snapshot.having("running")[:most]}
        for number in set(self._tasks) - set(shown):
            self._bars.remove_task(self._tasks.pop(number))
        counts, total = _counts(snapshot), _total(snapshot)
        self._bars.update(self._all, description=counts, completed=snapshot.share, figures=total)
        for number, job in shown.items():
            if number not in self._tasks:
                self._tasks[number] = self._bars.add_task(job.title, total=1.0, figures="")
            self._bars.update(self._tasks[number], completed=job.share, figures=_figures(job))
        self._bars.refresh()

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()


class LogDisplay:
    """A line for each job that ends, and once a minute one for each running job."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: set[int] = set()
        self._last_seconds = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Print what is new."""
        for job in snapshot.jobs:
            if job.report.is_over and job.report.number not in self._shown:
                self._shown.add(job.report.number)
                self._print(f"[{len(self._shown)}/{snapshot.total or '?'}] {_result(job)}")
                self._last_seconds = snapshot.seconds
        if snapshot.seconds - self._last_seconds >= _HEARTBEAT_SECONDS:
            self._last_seconds = snapshot.seconds
            for job in snapshot.having("running"):
                self._print(f"      {job.title}: {_figures(job)}")

    def close(self) -> None:
        """Do nothing."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def display_for(console: Console) -> LiveDisplay | LogDisplay:
    """Return progress bars for a terminal, lines for everything else."""
    return LiveDisplay(console) if console.is_terminal else LogDisplay(console)


def _counts(snapshot: Snapshot) -> str:
    done, failed, running, waiting, diverged = (
        len(snapshot.having(status))
        for status in (COMPLETED, FAILED, "running", "waiting", DIVERGED)
    )
    words = f"{snapshot.total or '?'} jobs: {done} done, {failed} failed, {running} running"
    words += f", {diverged} diverged" if diverged else ""
    return f"{words}, {waiting} waiting" if waiting else words


def _total(snapshot: Snapshot) -> str:
    left = snapshot.seconds_left
    time = _clock(snapshot.seconds) if left is None else f"{_clock(left)} left"
    return f"{100 * snapshot.share:.0f} %, {time}"


def _figures(job: Job) -> str:
    words = [f"{job.round}/{job.report.rounds}" if job.round >= 0 else "starting"]
    words += [said] if (said := _score(job)) else []
    words += [f"{job.failures} failures"] if job.failures else []
    return " ".join(words)


def _result(job: Job) -> str:
    report = job.report
    if report.status != COMPLETED:
        reason = shorten(report.error, _REASON_WIDTH)  # in full at the end
        return f"{job.title}: {report.status}{': ' * bool(reason)}{reason}"
    words = [said] if (said := _score(job)) else []
    words += [f"{job.round} rounds", _time(job)]
    return f"{job.title}: {', '.join(words)}"


def _score(job: Job) -> str:
    """Return the accuracy, or what is measured in its place with its name."""
    name, value = job.score
    return value if name == "accuracy" or not value else f"{name} {value}"


def _time(job: Job) -> str:
    return "earlier" if job.report.skipped else _clock(job.report.seconds)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def closing_summary(
    snapshot: Snapshot, folder: Path, objective: str, direction: str | None
) -> RenderableType:
    """Return the table of jobs, their errors, a search's best trial, and what to type next."""
    lines: list[RenderableType] = []
    if snapshot.jobs:
        lines.append(_job_table(snapshot.jobs, objective))
    reasons: dict[tuple[str, str], list[str]] = {}
    for job in snapshot.having(FAILED, DIVERGED):
        reasons.setdefault((job.report.status, job.report.error), []).append(job.title)
    for (status, reason), titles in reasons.items():
        lines.append(Text(f"{status:8} {', '.join(titles)}: {reason}", style="red"))
    place = shlex.quote(str(folder))
    lines.append(Text(f"results  {folder}\nreport   fedhet-report {place}"))
    if len(snapshot.having(COMPLETED, DIVERGED)) < (snapshot.total or len(snapshot.jobs)):
        lines.append(Text(f"continue fedhet -m --resume {place}"))
    best = direction and best_of([job.report for job in snapshot.jobs], objective, direction)
    for job in snapshot.jobs:
        if job.report is best:
            value = f"{job.report.figures[objective]:.6g}"
            words = shlex.join(job.words)  # can be typed again
            line = f"best     #{job.report.number} {objective} {value}: {words}"
            lines.append(Text(line, style="bold green"))
    return Group(*lines)


def _job_table(jobs: Sequence[Job], objective: str) -> Table:
    own = [] if objective in ("accuracy", "best_accuracy", "rounds") else [objective]
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("job", justify="right", style="dim", no_wrap=True)
    table.add_column("", overflow="fold", min_width=16)
    names = {job.score[0] for job in jobs if job.score[1]}
    measured = names.pop() if len(names) == 1 else "accuracy"  # with several, each has its name
    for head in (measured, "best", *own, "rounds", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    for job in jobs:
        figures, status = job.report.figures, Text(job.report.status, style="red")
        if job.report.status == COMPLETED:
            value = job.score[1] if job.score[0] == measured else _score(job)
            status = Text(value, style="bold green")
        table.add_row(
            f"#{job.report.number}",
            Text(job.label),
            status,
            percent(figures.get("best_accuracy"), ""),
            *(f"{figures[name]:.6g}" if name in figures else "" for name in own),
            str(max(0, job.round)),
            _time(job),
        )
    return table
