"""The folder of a sweep: what was asked for, and what its jobs report.

sweep.json is the public record: the words that were typed, when the sweep began and ended, its jobs
and their status. ``.sweep/`` holds what the jobs and the launcher process tell each other; it is
removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text
from fedhet.common.results import COMPLETED, DIVERGED, FAILED, STOPPED

INDEX = "sweep.json"


@dataclass(frozen=True)
class JobReport:
    """What a job says about itself."""

    number: int  # Hydra's, from 0
    folder: str  # its results directory, a name below the sweep's folder
    overrides: Sequence[str]  # the words that its recipe is composed from
    status: str  # waiting (for its share of the machine), running, or how its run has ended
    rounds: int  # the last round of its recipe
    began: float | None  # seconds since the epoch; None: it has completed before this call
    ended: float | None = None
    process: str = ""  # where it runs: "host:pid"
    error: str = ""  # why it did not complete
    figures: Mapping[str, float] = field(default_factory=dict)  # the numbers of its summary.json

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.status in (COMPLETED, DIVERGED, STOPPED, FAILED)

    @property
    def skipped(self) -> bool:
        """Whether it was not run again."""
        return self.began is None

    @property
    def seconds(self) -> float:
        """How long the job took; 0 while it runs."""
        return 0.0 if self.ended is None or self.began is None else self.ended - self.began

    def entry(self) -> dict[str, Any]:
        """Return the job's entry in sweep.json."""
        names = ("number", "folder", "overrides", "status", "began", "ended", "error", "figures")
        entry = {name: value for name, value in asdict(self).items() if name in names}
        for name in ("began", "ended"):
            entry[name] = None if entry[name] is None else timestamp(entry[name])
        return entry


@dataclass(frozen=True)
class Sweep:
    """The sweep as a whole, as sweep.json describes it."""

    overrides: Sequence[str]  # the words that were typed
    began: str  # when it was first started
    status: str = "running"  # running, completed, stopped, or failed: one job is not completed
    ended: str | None = None
    resumed: Sequence[str] = ()  # when ``--resume`` continued it
    total: int | None = None  # how many jobs there are; None if only the sweeper knows
    batch_size: int | None = None  # how many of them are handed to the launcher at once, at most
    objective: str = "accuracy"  # the figure that a search optimises
    varied: Sequence[str] = ()  # the keys that have more than one value, in this call or before


class SweepFolder:
    """The files of one sweep; its folder need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.index_path = self.path / INDEX
        self.inner = self.path / ".sweep"
        self._reports_path = self.inner / "jobs"

    def read(self) -> Sweep:
        """Return what sweep.json says of the sweep; refuse another file."""
        index = self._index()
        names = {one.name for one in fields(Sweep)}
        try:
            return Sweep(**{name: value for name, value in index.items() if name in names})
        except TypeError as error:
            raise ConfigError(f"{self.index_path} is not the index of a sweep: {error}") from None

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Return the jobs of sweep.json, by the name of their folder."""
        jobs = self._index().get("jobs", ())
        try:
            return {str(job["folder"]): dict(job) for job in jobs}
        except (TypeError, KeyError, ValueError):
            raise ConfigError(
                f"{self.index_path} is not the index of a sweep: each of its jobs needs a folder"
            ) from None

    def write(self, sweep: Sweep, jobs: Iterable[Mapping[str, Any]] = ()) -> None:
        """Write sweep.json, whole or not at all."""
        jobs = list(jobs)
        save_text(self.index_path, json.dumps({**asdict(sweep), "jobs": jobs}, indent=1) + "\n")

    def report(self, job: JobReport) -> None:
        """Store what a job says about itself."""
        self._reports_path.mkdir(parents=True, exist_ok=True)
        save_text(self._reports_path / f"{job.number}.json", json.dumps(asdict(job)))

    def reports(self) -> list[JobReport]:
        """Return the latest report of each job, by number."""
        texts = [path.read_text(encoding="utf-8") for path in self._reports_path.glob("*.json")]
        return sorted((JobReport(**json.loads(text)) for text in texts), key=lambda job: job.number)

    def claim(self, folder: str, number: int) -> int:
        """Return the number of the job that has a folder: this one, if it asks first."""
        path = self.inner / "claims" / folder
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.symlink_to(str(number))  # made whole or not at all, whoever else asks
        return int(os.readlink(path))

    def ask_to_stop(self) -> None:
        """Let no further job begin."""
        self.inner.mkdir(parents=True, exist_ok=True)
        (self.inner / "stop").touch()

    def is_stopping(self) -> bool:
        """Return whether no further job may begin."""
        return (self.inner / "stop").exists()

    def clear(self) -> None:
        """Remove ``.sweep/``."""
        shutil.rmtree(self.inner, ignore_errors=True)

    def _index(self) -> dict[str, Any]:
        try:
            index = json.loads(self.index_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} is not the folder of a sweep: {error}") from None
        return index if isinstance(index, dict) else {}


def timestamp(seconds: float | None = None) -> str:
    """Return a time, by default now, in ISO 8601 with its zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
