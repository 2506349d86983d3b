"""What the command line names: sweeps, runs and data files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from experiments.report.data import DataError, Origin, ReportData, merged, read_data
from experiments.report.layout import same_but_seed
from experiments.report.runs import COMPLETED, Run, find_runs, read_run


class SourceError(ValueError):
    """A source that has nothing to report."""


def read_sources(paths: Sequence[Path]) -> ReportData:
    """Return all that the sources hold; what is named twice counts once.

    Raises:
        SourceError: if a source is missing, or holds no run.
        DataError: if a file is no data file.
    """
    seen: set[Path] = set()
    parts = [_read_source(path, len(paths) > 1, seen) for path in paths]
    data = merged(parts)
    if not data.runs:
        raise SourceError(f"there is no run in {', '.join(map(str, paths))}")
    return replace(data, runs=_with_first_classifiers(data.runs))


def _with_first_classifiers(runs: Sequence[Run]) -> list[Run]:
    """Keep the classifiers of the first seed alone: they are what is shown, and large."""
    shown = set()
    for group in same_but_seed(runs):
        by_seed = {run.seed: run for run in group if run.status == COMPLETED}  # as in a cell
        ordered = sorted(by_seed.values(), key=lambda run: -1 if run.seed is None else run.seed)
        shown.add(id(next((run.relations for run in ordered if run.relations), None)))
        shown.add(id(next((run.head_norms for run in ordered if run.head_norms), None)))
    return [
        replace(
            run,
            relations=run.relations if id(run.relations) in shown else None,
            head_norms=run.head_norms if id(run.head_norms) in shown else None,
        )
        for run in runs
    ]


def _read_source(path: Path, several: bool, seen: set[Path]) -> ReportData:
    if path.is_file():
        return read_data(path)
    if not path.is_dir():
        raise SourceError(f"{path} is no folder; name folders of sweeps or runs, or a report.json")
    folder = path.resolve()
    found = [run for run in find_runs(folder) if run not in seen]
    seen.update(found)
    index = _read_index(folder)
    by_folder = {str(job.get("folder")): job for job in index.get("jobs", [])}
    runs = []
    for run_folder in found:
        inner = str(run_folder.relative_to(folder))
        name = folder.name if inner == "." else inner
        shown = f"{folder.name}/{inner}" if several and inner != "." else name
        runs.append(_with_job(read_run(run_folder, shown, 0), by_folder.pop(inner, {})))
    failures = [f"{name}: {job['error']}" for name, job in by_folder.items() if job.get("error")]
    if not runs and not failures and not any(find_runs(folder)):
        raise SourceError(
            f"{path} holds no run: none of its folders has a config.yaml, metrics.jsonl or "
            "summary.json"
        )
    return ReportData(runs=runs, origins=[Origin(folder.name, _command(folder, index), failures)])


def _with_job(run: Run, job: Mapping[str, Any]) -> Run:
    """Add what the sweep knows of a run that could not say it itself."""
    error = str(job.get("error", ""))
    if run.status == COMPLETED or not error or error in run.error:
        return run
    return replace(run, status="failed", error=f"{error}; {run.error}".strip("; "))


def _read_index(folder: Path) -> dict[str, Any]:
    """Return a sweep's sweep.json; empty where there is none, or none that can be read."""
    try:
        index = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _command(folder: Path, index: Mapping[str, Any]) -> str:
    """Return the command of a sweep, as far as it is recorded."""
    words = index.get("overrides") or _multirun_words(folder / "multirun.yaml")
    return shlex.join(["fedhet", "-m", *words]) if words else ""


def _multirun_words(path: Path) -> list[str]:
    """Return the overrides of Hydra's own record."""
    try:
        node = yaml.load(
            path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
        typed = node["hydra"]["overrides"]
        return [
            str(word) for word in (*typed["task"], *typed["hydra"]) if "hydra.mode=" not in word
        ]
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        return []


__all__ = ["DataError", "SourceError", "read_sources"]
