"""How far the jobs of a sweep are, read from their folders."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedhet.common.errors import DamagedFileError
from fedhet.common.results import METRICS, read_rows
from fedhet.progress import score
from fedhet.sweep.resume import key_of
from fedhet.sweep.sweep_folder import JobReport, SweepFolder

_NAMED_BY_VALUE = ("strategy", "task", "partition", "experiment")


@dataclass(frozen=True)
class Job:
    """A job as a display shows it."""

    report: JobReport  # what it says about itself
    words: Sequence[str]  # the overrides that tell it apart from the others
    round: int = -1  # the last round that ended, -1 before round 0
    score: tuple[str, str] = ("accuracy", "")  # name and value, of the last evaluation
    failures: int = 0  # replies that were missing or refused so far

    @property
    def label(self) -> str:
        """The words that tell it apart, shortened: `fedavg seed=0 alpha=0.1`."""
        return " ".join(shortened(word) for word in self.words) or self.report.folder

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
    """All jobs at one moment."""

    jobs: Sequence[Job]  # those that have begun, by number
    total: int | None  # of all jobs; None if only the sweeper knows
    seconds: float  # since this call began

    def having(self, *statuses: str) -> list[Job]:
        """Return the jobs of these statuses."""
        return [job for job in self.jobs if job.report.status in statuses]

    @property
    def share(self) -> float:
        """How much of the sweep is done, from 0 to 1."""
        return sum(job.share for job in self.jobs) / max(1, self.total or len(self.jobs))

    @property
    def seconds_left(self) -> float | None:
        """The estimated time to the end; None where it cannot be estimated."""
        run = sum(job.share for job in self.jobs if not job.report.skipped)
        if self.total is None or run < 0.05:
            return None
        return self.seconds / run * (self.total - sum(job.share for job in self.jobs))


class SweepFollower:
    """Reads the folders of a running sweep's jobs, which the ``varied`` keys tell apart."""

    def __init__(self, folder: SweepFolder, total: int | None, varied: Sequence[str]) -> None:
        self._folder, self._total, self._varied = folder, total, varied
        self._began = time.monotonic()

    def snapshot(self) -> Snapshot:
        """Return the state of all jobs."""
        jobs = [self._job(report) for report in self._folder.reports()]
        return Snapshot(jobs, self._total, time.monotonic() - self._began)

    def _job(self, report: JobReport) -> Job:
        words = [word for word in report.overrides if key_of(word) in self._varied]
        if report.status == "completed":
            figures = report.figures
            rounds, failures = int(figures.get("rounds", -1)), int(figures.get("failures", 0))
            return Job(report, words, rounds, score(figures), failures)
        path = self._folder.path / report.folder / METRICS
        with suppress(OSError, DamagedFileError):  # the job itself says what is wrong
            if report.status != "waiting":  # else an earlier call wrote the rows
                status = path.stat()
                return Job(report, words, **_latest(path, status.st_mtime_ns, status.st_size))
        return Job(report, words)


@lru_cache(maxsize=256)
def _latest(path: Path, modified: int, size: int) -> Mapping[str, Any]:
    """Return round, score and failures of a metrics.jsonl, read again when it has changed."""
    rows = read_rows(path)
    measured = [found for row in rows if (found := score(row))[1]]
    return {
        "round": max((int(row["round"]) for row in rows), default=-1),
        "score": measured[-1] if measured else ("accuracy", ""),
        "failures": sum(len(row.get("failures", ())) for row in rows),
    }


def shortened(word: str) -> str:
    """Return an override with the last part of its key: ``alpha=0.1``; of an option its name."""
    key, _, value = re.sub(r"\\(.)", r"\1", word).partition("=")  # without Hydra's escapes
    name = key.lstrip("+").rpartition(".")[2]
    name = key.lstrip("+") if name == "seed" else name  # partition.seed is another one
    try:
        value = f"{float(value):.4g}" if len(value) > 6 and not value.isdigit() else value
    except ValueError:
        pass
    return value if name in _NAMED_BY_VALUE else f"{name}={value}"
