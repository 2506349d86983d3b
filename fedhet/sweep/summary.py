"""The summary at the end of a sweep: its jobs, errors, best trial, and what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedhet.progress import percent
from fedhet.sweep.display import clock
from fedhet.sweep.optuna_search import best_of
from fedhet.sweep.progress import Job, Snapshot


def closing_summary(
    snapshot: Snapshot, folder: Path, objective: str, direction: str | None
) -> RenderableType:
    """Return the summary of a sweep.

    Args:
        snapshot: the last one.
        folder: the sweep's.
        objective: the figure that a search optimises.
        direction: of the search; None without one.
    """
    lines: list[RenderableType] = []
    if snapshot.jobs:
        lines.append(_job_table(snapshot.jobs, objective))
    lines += _failures(snapshot.having("failed"))
    lines += _next_steps(snapshot, folder)
    if direction:
        best = best_of([job.report for job in snapshot.jobs], objective, direction)
        lines += [_best(job, objective) for job in snapshot.jobs if job.report is best]
    return Group(*lines)


def _job_table(jobs: Sequence[Job], objective: str) -> Table:
    own = [] if objective in ("accuracy", "best_accuracy", "rounds") else [objective]
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("job", justify="right", style="dim", no_wrap=True)
    table.add_column("", overflow="fold", min_width=16)
    for head in ("accuracy", "best", *own, "rounds", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    for job in jobs:
        report = job.report
        cells = [_result(job), Text(percent(report.figures.get("best_accuracy"), ""))]
        cells += [Text(_number(report.figures.get(figure))) for figure in own]
        cells.append(Text(str(max(0, job.round))))
        cells.append(Text("earlier" if report.skipped else clock(report.seconds)))
        table.add_row(f"#{report.number}", Text(job.label), *cells)
    return table


def _failures(jobs: Sequence[Job]) -> list[Text]:
    """Return a line for every reason, with the jobs that failed for it."""
    reasons: dict[str, list[str]] = {}
    for job in jobs:
        reasons.setdefault(job.report.error, []).append(job.title)
    return [
        Text(f"failed   {', '.join(titles)}: {reason}", style="red")
        for reason, titles in reasons.items()
    ]


def _next_steps(snapshot: Snapshot, folder: Path) -> list[Text]:
    lines = [f"results  {folder}", f"report   fedhet-report {folder}"]
    if len(snapshot.having("completed")) < (snapshot.total or len(snapshot.jobs)):
        lines.append(f"continue fedhet -m --resume {folder}")
    return [Text(line) for line in lines]


def _best(job: Job, objective: str) -> Text:
    value = _number(job.report.figures[objective])
    words = " ".join(job.words)  # can be typed again
    return Text(f"best     #{job.report.number} {objective} {value}: {words}", style="bold green")


def _result(job: Job) -> Text:
    if job.report.status == "completed":
        return Text(percent(job.accuracy, ""), style="bold green")
    return Text(job.report.status, style="red")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
