"""How a terminal, or a log, shows a running sweep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from textwrap import shorten
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedhet.progress import percent
from fedhet.sweep.progress import Job, Snapshot

_HEARTBEAT_SECONDS = 60.0
_LINES_BESIDE_JOBS = 4
_REASON_WIDTH = 80
_FIGURES_WIDTH = 46  # of a running job's line: all but its label


class SweepDisplay(Protocol):
    """Shows a sweep while it runs."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the state of all jobs."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveDisplay:
    """A live view of the total progress and of each running job, from the first job's start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._failed: set[int] = set()

    def show(self, snapshot: Snapshot) -> None:
        """Draw the view again, and print jobs that have failed above it."""
        if not snapshot.jobs:
            return  # an error of the launcher may come first
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,  # would need another thread
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        _fit(self._console)
        for job in snapshot.having("failed"):
            if job.report.number not in self._failed:
                self._failed.add(job.report.number)
                line = Text(f"failed   {job.title}: {job.report.error}", style="red")
                line.truncate(self._console.width, overflow="ellipsis")  # in full at the end
                self._console.print(line)
        most = max(1, self._console.height - _LINES_BESIDE_JOBS)
        self._live.update(live_view(snapshot, most, self._console.width), refresh=True)

    def close(self) -> None:
        """Remove the view."""
        if self._live is not None:
            self._live.stop()


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
                self._print(f"[{len(self._shown)}/{snapshot.total or '?'}] {_ended_job(job)}")
                self._last_seconds = snapshot.seconds
        if snapshot.seconds - self._last_seconds >= _HEARTBEAT_SECONDS:
            self._last_seconds = snapshot.seconds
            for job in snapshot.having("running"):
                self._print(f"      {job.title}: {_progress(job)}")

    def close(self) -> None:
        """Do nothing."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def sweep_console(file: IO[str]) -> Console:
    """Return a console on a file, which stays when stdout is redirected."""
    console = Console(file=file)
    _fit(console)
    return console


def display_for(console: Console) -> SweepDisplay:
    """Return the live view for a terminal, lines for everything else."""
    return LiveDisplay(console) if console.is_terminal else LogDisplay(console)


def live_view(snapshot: Snapshot, most: int, width: int) -> RenderableType:
    """Return counts, total progress, and at most ``most`` lines of running jobs."""
    running = snapshot.having("running")
    lines: list[RenderableType] = [_counts(snapshot), _total(snapshot, width)]
    if running:
        lines.append(_running_table(running[:most], width))
    if len(running) > most:
        lines.append(Text(f"  and {len(running) - most} more", style="dim"))
    return Group(*lines)


def _counts(snapshot: Snapshot) -> Text:
    name = f"sweep of {snapshot.total} jobs: " if snapshot.total else "sweep: "
    counts = []
    for status, word in (("completed", "done"), ("failed", "failed"), ("running", "running")):
        counts.append(Text(f"{len(snapshot.having(status))} {word}"))
    if snapshot.having("failed"):
        counts[1].stylize("bold red")
    if waiting := snapshot.having("waiting"):
        counts.append(Text(f"{len(waiting)} waiting"))
    return Text.assemble((name, "bold"), Text(", ").join(counts))


def _total(snapshot: Snapshot, width: int) -> Table:
    left = snapshot.seconds_left
    times = clock(snapshot.seconds) + ("" if left is None else f", {clock(left)} left")
    table = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=snapshot.share, width=max(10, width - 36))
    table.add_row(bar, f"{100 * snapshot.share:.0f} %", Text(times, style="dim"))
    return table


def _running_table(jobs: Sequence[Job], width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(10, width - _FIGURES_WIDTH))
    table.add_column(width=10, no_wrap=True)
    for style in ("", "green", "yellow"):
        table.add_column(justify="right", no_wrap=True, style=style)
    for job in jobs:
        table.add_row(
            f"#{job.report.number}",
            Text(job.label),
            ProgressBar(total=1.0, completed=job.share, width=10),
            f"{job.round}/{job.report.rounds}" if job.round >= 0 else "starting",
            percent(job.accuracy, ""),
            f"{job.failures} failures" if job.failures else "",
        )
    return table


def clock(seconds: float) -> str:
    """Return a duration as text, such as `12 s` or `0:03:40`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _ended_job(job: Job) -> str:
    report = job.report
    if report.status != "completed":
        reason = shorten(report.error, _REASON_WIDTH)  # in full at the end
        return f"{job.title}: {report.status}{': ' * bool(reason)}{reason}"
    words = [percent(job.accuracy)] if job.accuracy is not None else []
    words += [f"{job.round} rounds", "earlier" if report.skipped else clock(report.seconds)]
    return f"{job.title}: {', '.join(words)}"


def _progress(job: Job) -> str:
    words = f"round {max(0, job.round)}/{job.report.rounds}"
    return words if job.accuracy is None else f"{words}, {percent(job.accuracy)}"


def _fit(console: Console) -> None:
    """Give the console the size of its own terminal, since Rich looks at stdin and stdout."""
    if console.is_terminal:
        try:
            columns, lines = os.get_terminal_size(console.file.fileno())
        except (OSError, ValueError):
            return
        if columns and lines:
            console.size = (columns, lines)
