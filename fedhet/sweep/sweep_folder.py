"""The folder of a sweep: what it was asked for, and what its jobs report.

sweep.json is for everybody: the words that were typed, when it began and ended, the jobs and their
status. ``.sweep/`` holds what jobs and launcher process tell each other, and goes at the end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.files import save_text

ENDED = ("completed", "failed", "stopped")


@dataclass(frozen=True)
class JobReport:
    """What a job says about itself.

    Attributes:
        number: Hydra's, from 0.
        folder: its results directory, a name below the sweep's folder.
        overrides: the words that its recipe is composed from.
        status: waiting (for its share of the machine), running, completed, failed or stopped.
        rounds: the last round of its recipe.
        began, ended: seconds since the epoch.
        host, pid: where it runs.
        skipped: it had completed in an earlier call, and was not run again.
        error: why it failed.
        figures: the numbers of its summary.json.
    """

    number: int
    folder: str
    overrides: Sequence[str]
    status: str
    rounds: int
    began: float
    ended: float | None = None
    host: str = ""
    pid: int = 0
    skipped: bool = False
    error: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status in ENDED

    @property
    def seconds(self) -> float:
        """How long it took; 0 as long as it runs."""
        return 0.0 if self.ended is None else self.ended - self.began

    def entry(self) -> dict[str, Any]:
        """Return it as sweep.json has it."""
        words: dict[str, Any] = {
            "number": self.number,
            "folder": self.folder,
            "overrides": list(self.overrides),
            "status": self.status,
            "began": timestamp(self.began),
            "ended": None if self.ended is None else timestamp(self.ended),
        }
        if self.error:
            words["error"] = self.error
        return words | {"figures": dict(self.figures)}


@dataclass(frozen=True)
class Sweep:
    """What sweep.json says of the sweep as a whole.

    Attributes:
        overrides: the words that were typed.
        began: when it was first started.
        status: running, completed, failed (one job at least) or stopped.
        resumed: when ``--resume`` went on with it.
        total: how many jobs there are; None if the sweeper alone knows.
        together: how many of them are handed to the launcher at once, at most.
        objective: the figure that a search optimises.
    """

    overrides: Sequence[str]
    began: str
    status: str = "running"
    ended: str | None = None
    resumed: Sequence[str] = ()
    total: int | None = None
    together: int | None = None
    objective: str = "accuracy"


class SweepRefused(Exception):
    """A sweep that cannot be started; the message is for the user."""


class FolderTaken(ValueError):
    """Two jobs of a sweep would write to one folder."""


class SweepFolder:
    """The files of one sweep.

    Args:
        path: of the folder; need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.index_path = self.path / "sweep.json"
        self.inner = self.path / ".sweep"
        self.reports_path = self.inner / "jobs"

    def read(self) -> Sweep:
        """Return what sweep.json says of the sweep.

        Raises:
            SweepRefused: if there is none, or it is not one that this version has written.
        """
        try:
            found = json.loads(self.index_path.read_text(encoding="utf-8"))
            return Sweep(**{one.name: found[one.name] for one in fields(Sweep)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SweepRefused(f"{self.path} is no sweep's folder: sweep.json: {error}") from None

    def entries(self) -> dict[int, dict[str, Any]]:
        """Return the jobs that sweep.json holds, by number."""
        try:
            jobs = json.loads(self.index_path.read_text(encoding="utf-8"))["jobs"]
            return {int(entry["number"]): entry for entry in jobs}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(self, sweep: Sweep, entries: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Write sweep.json, whole or not at all."""
        jobs = [dict(entry) for _, entry in sorted((entries or {}).items())]
        save_text(self.index_path, json.dumps({**asdict(sweep), "jobs": jobs}, indent=1) + "\n")

    def report(self, job: JobReport) -> None:
        """Let a job say where it stands."""
        self.reports_path.mkdir(parents=True, exist_ok=True)
        save_text(self._report_path(job.number), json.dumps(asdict(job)))

    def reports(self) -> list[JobReport]:
        """Return what the jobs have last said, by number."""
        found = []
        for path in self.reports_path.glob("*.json"):
            found.append(JobReport(**json.loads(path.read_text(encoding="utf-8"))))
        return sorted(found, key=lambda job: job.number)

    def claim(self, name: str, number: int) -> bool:
        """Let a job have a folder for itself.

        Returns:
            True if it has claimed it before: a cluster has started it once more.

        Raises:
            FolderTaken: if another job of this call has it.
        """
        claims = self.inner / "claims"
        claims.mkdir(parents=True, exist_ok=True)
        path = claims / name
        try:
            with path.open("x", encoding="ascii") as file:
                file.write(str(number))
        except FileExistsError:
            if path.read_text(encoding="ascii") == str(number):
                return True
            raise FolderTaken(
                f"{self.path / name} is the folder of another job: let hydra.sweep.subdir name "
                "what tells the jobs apart"
            ) from None
        return False

    def ask_to_stop(self) -> None:
        """Let no further job begin."""
        self.inner.mkdir(parents=True, exist_ok=True)
        (self.inner / "stop").touch()

    def is_stopping(self) -> bool:
        """Return whether no further job shall begin."""
        return (self.inner / "stop").exists()

    def forget_reports(self) -> None:
        """Remove what jobs have told each other in an earlier call, which may have been killed."""
        for name in ("jobs", "claims", "slots"):
            shutil.rmtree(self.inner / name, ignore_errors=True)
        for name in ("stop", "errors.txt"):
            (self.inner / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what jobs and launcher process have told each other."""
        shutil.rmtree(self.inner, ignore_errors=True)

    def _report_path(self, number: int) -> Path:
        return self.reports_path / f"{number}.json"


def timestamp(seconds: float | None = None) -> str:
    """Return a time, by default now, as sweep.json has it: ISO 8601 with the zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
