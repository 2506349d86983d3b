"""Reads what the command line names: sweeps, runs and data files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError
from fedhet.common.results import COMPLETED, CONFIG, DIVERGED, FAILED, STOPPED
from fedhet.report.data_file import Origin, ReportData, merged, read_data
from fedhet.report.run_data import RUNNING, Run, find_runs, read_run
from fedhet.sweep.sweep_folder import Sweep, SweepFolder


def read_sources(paths: Sequence[Path]) -> ReportData:
    """Return the data of folders and data files; a run that is named twice counts once.

    A source that is missing, has no run, or is not a data file is a ConfigError.
    """
    seen: set[Path] = set()
    data = merged([_read_source(path, len(paths) > 1, seen) for path in paths])
    if not data.runs:
        raise ConfigError(f"there is no run in {', '.join(map(str, paths))}")
    return data


def require_folders(paths: Iterable[Path]) -> None:
    """Raise a ConfigError if one of the paths is not a folder."""
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder; name folders of sweeps or runs")


def has_all_runs(folder: Path) -> bool:
    """Return whether a folder gets no other run: it is that of a run, or of an ended sweep."""
    sweep, _ = _read_index(folder)
    return (folder / CONFIG).is_file() or (sweep and sweep.status) in (COMPLETED, FAILED)


def completed_runs(paths: Sequence[Path]) -> tuple[list[tuple[Run, Path]], list[str]]:
    """Return the completed runs with their results directories, and why others are left out.

    Raises:
        ConfigError: if a path is not a folder, or no run is completed.
    """
    require_folders(paths)
    data = read_sources(paths)
    found = [(run, run.folder) for run in data.runs if run.status == COMPLETED and run.folder]
    others = [run for run in data.runs if run.status != COMPLETED]
    left_out = [f"{run.name} is {run.status} and left out: {run.error}" for run in others]
    left_out += [f"left out: {failure}" for origin in data.origins for failure in origin.failures]
    if not found:
        names = ", ".join(map(str, paths))
        why = "; ".join(["", *left_out])
        raise ConfigError(f"{names} has no completed run with its results directory{why}")
    return found, left_out


def _read_source(path: Path, several: bool, seen: set[Path]) -> ReportData:
    if path.is_file():
        return read_data(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; name folders of sweeps or runs, or report.json")
    folder = path.resolve()
    all_found = list(find_runs(folder))
    found = [run for run in all_found if run not in seen]
    seen.update(found)
    sweep, jobs = _read_index(folder)
    runs = []
    for run_folder in found:
        inner = str(run_folder.relative_to(folder))
        name = folder.name if inner == "." else inner
        shown = f"{folder.name}/{inner}" if several and inner != "." else name
        runs.append(_with_job_error(read_run(run_folder, shown, 0), jobs.pop(inner, {})))
    known = {str(run.relative_to(folder)) for run in all_found}  # some with another source
    left = {name: _why_without_results(job) for name, job in jobs.items() if name not in known}
    failures = [f"{name}: {reason}" for name, reason in left.items() if reason]
    if not all_found and not failures:
        raise ConfigError(
            f"{path} has no run: none of its folders has a config.yaml, metrics.jsonl or "
            "summary.json"
        )
    done = sum(run.status in (COMPLETED, DIVERGED) for run in runs)
    origin = Origin(folder.name, failures=failures)
    if sweep is not None:
        command = shlex.join(["fedhet", "-m", *sweep.overrides])
        unfinished = _unfinished(path, sweep, done)
        origin = replace(origin, command=command, unfinished=unfinished, varied=sweep.varied)
    return ReportData(runs=runs, origins=[origin])


def _unfinished(path: Path, sweep: Sweep, done: int) -> str:
    """Return how many jobs of a sweep that has not ended have results, and what continues it."""
    ends = {STOPPED: ("was stopped", ""), RUNNING: ("has not ended", "If it was killed, ")}
    if sweep.status not in ends:
        return ""
    how, condition = ends[sweep.status]
    jobs = f"{sweep.total} jobs" if sweep.total else "jobs"  # a search may not know how many
    resume = shlex.join(["fedhet", "-m", "--resume", str(path)])
    return (
        f"The sweep {path.resolve().name} {how}: {done} of its {jobs} are done. "
        f"{condition}{resume} continues it."
    )


def _with_job_error(run: Run, job: Mapping[str, Any]) -> Run:
    """Add the error that the sweep recorded for a run that could not record it itself."""
    error = str(job.get("error", ""))
    if run.status == COMPLETED or not error or error in run.error:
        return run
    status = str(job.get("status", FAILED))
    return replace(run, status=status, error=f"{error}; {run.error}".strip("; "))


def _why_without_results(job: Mapping[str, Any]) -> str:
    """Return why a job of a sweep has no results directory; empty if it has not ended."""
    if error := job.get("error"):
        return str(error)
    missing = "its folder is missing or empty, though sweep.json says that it has completed"
    return missing if job.get("status") == COMPLETED else ""


def _read_index(folder: Path) -> tuple[Sweep | None, dict[str, dict[str, Any]]]:
    """Return the sweep of a folder, None of another folder, and its jobs by their folder."""
    try:
        return SweepFolder(folder).read(), SweepFolder(folder).jobs()
    except ConfigError:
        return None, {}
