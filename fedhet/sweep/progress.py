"""What the jobs of a sweep have come to, as their folders have it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results import read_rows
from fedhet.sweep.sweep_folder import JobReport, SweepFolder

_NAMED_BY_VALUE = ("strategy", "task", "partition", "experiment")


@dataclass(frozen=True)
class Job:
    """A job as a display shows it.

    Attributes:
        report: what it says of itself.
        words: the overrides that tell it apart from the others.
        round: the last round that ended, -1 before round 0.
        accuracy: of the last evaluation.
        failures: replies that were missing or refused so far.
    """

    report: JobReport
    words: Sequence[str]
    round: int = -1
    accuracy: float | None = None
    failures: int = 0

    @property
    def label(self) -> str:
        """The words that tell it apart, short: `fedavg seed=0 alpha=0.1`."""
        return " ".join(_shortened(word) for word in self.words) or self.report.folder

    @property
    def title(self) -> str:
        """Its number and its label."""
        return f"#{self.report.number} {self.label}"

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        if self.report.is_over:
            return 1.0
        return max(0, self.round) / max(1, self.report.rounds)


@dataclass(frozen=True)
class Snapshot:
    """All jobs at one moment.

    Attributes:
        jobs: those that have begun, by number.
        total: of all jobs; None if the sweeper alone knows.
        seconds: since this call began.
    """

    jobs: Sequence[Job]
    total: int | None
    seconds: float

    def having(self, status: str) -> list[Job]:
        """Return the jobs of this status."""
        return [job for job in self.jobs if job.report.status == status]

    @property
    def over(self) -> list[Job]:
        """The jobs of which nothing more comes."""
        return [job for job in self.jobs if job.report.is_over]

    @property
    def share(self) -> float:
        """How much of the sweep is done, from 0 to 1."""
        return sum(job.share for job in self.jobs) / max(1, self.total or len(self.jobs))

    @property
    def seconds_left(self) -> float | None:
        """How long it will take if it goes on like this; None as long as nobody can tell."""
        run = sum(job.share for job in self.jobs if not job.report.skipped)
        if self.total is None or run < 0.05:
            return None
        left = self.total - sum(job.share for job in self.jobs)
        return self.seconds / run * left


class Watch:
    """Reads the jobs' folders again and again, only what has changed.

    Args:
        folder: the sweep's.
        total: how many jobs there are, if that is known.
        varied: the keys that tell jobs apart.
    """

    def __init__(self, folder: SweepFolder, total: int | None, varied: Sequence[str]) -> None:
        self._folder, self._total, self._varied = folder, total, varied
        self._began = time.monotonic()
        self._rows: dict[Path, tuple[tuple[int, int], Mapping[str, Any]]] = {}

    def look(self) -> Snapshot:
        """Return what the jobs have come to now."""
        jobs = [self._job(report) for report in self._folder.reports()]
        return Snapshot(jobs, self._total, time.monotonic() - self._began)

    def _job(self, report: JobReport) -> Job:
        words = [word for word in report.overrides if word.partition("=")[0] in self._varied]
        figures = report.figures
        if report.status == "completed":
            failures = int(figures.get("failures", 0))
            accuracy = figures.get("accuracy")
            return Job(report, words, int(figures.get("rounds", -1)), accuracy, failures)
        if report.status == "waiting":  # what its folder holds is from an earlier call
            return Job(report, words)
        latest = self._latest(self._folder.path / report.folder / "metrics.jsonl")
        return Job(report, words, **latest)

    def _latest(self, path: Path) -> Mapping[str, Any]:
        try:
            status = path.stat()
        except OSError:
            return {}
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._rows.get(path)
        if known is None or known[0] != stamp:
            rows = read_rows(path)
            measured = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
            latest = {
                "round": max((int(row["round"]) for row in rows), default=-1),
                "accuracy": measured[-1] if measured else None,
                "failures": sum(len(row.get("failures", ())) for row in rows),
            }
            known = self._rows[path] = (stamp, latest)
        return known[1]


def _shortened(word: str) -> str:
    key, _, value = word.partition("=")
    name = key.lstrip("+").rpartition(".")[2]
    try:
        value = f"{float(value):.4g}" if len(value) > 6 else value
    except ValueError:
        pass
    return value if name in _NAMED_BY_VALUE else f"{name}={value}"
