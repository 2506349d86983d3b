"""What the command line names: sweeps, runs and data files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from fedhet.report.data_file import LARGE, DataError, Origin, ReportData, merged, read_data
from fedhet.report.layout import same_but_seed
from fedhet.report.run_data import COMPLETED, Run, find_runs, read_run
from reproductions.maecho.fusion_path import can_fuse_again, fuse_again


class SourceError(ConfigError):
    """A source that has nothing to report."""


def read_sources(paths: Sequence[Path], say: Callable[[str], None] = lambda _: None) -> ReportData:
    """Return all that the sources hold; what is named twice counts once.

    Args:
        paths: of folders and data files.
        say: told what takes long.

    Raises:
        SourceError: if a source is missing, or holds no run.
        DataError: if a file is no data file.
    """
    data = _read_all(paths)
    return replace(data, runs=_with_paths(_with_first_seeds(data.runs), say))


def completed_runs(paths: Sequence[Path]) -> list[tuple[Run, Path]]:
    """Return the completed runs that the sources hold, each with its results directory.

    Raises:
        SourceError: if a source is missing, or there is no such run.
        DataError: if a file is no data file.
    """
    runs = _read_all(paths).runs
    found = [(run, run.folder) for run in runs if run.status == COMPLETED and run.folder]
    if not found:
        raise SourceError("there is no completed run with its folder among these")
    return found


def _read_all(paths: Sequence[Path]) -> ReportData:
    seen: set[Path] = set()
    data = merged([_read_source(path, len(paths) > 1, seen) for path in paths])
    if not data.runs:
        raise SourceError(f"there is no run in {', '.join(map(str, paths))}")
    return data


def _with_first_seeds(runs: Sequence[Run]) -> list[Run]:
    """Keep what is large of the first seed alone, which is what is shown."""
    shown = set()
    for group in same_but_seed(runs):
        by_seed = {run.seed: run for run in group if run.status == COMPLETED}  # as in a cell
        ordered = sorted(by_seed.values(), key=lambda run: -1 if run.seed is None else run.seed)
        for name in LARGE:
            shown.add(id(next((found for run in ordered if (found := getattr(run, name))), None)))
    return [
        _without(run, [name for name in LARGE if id(getattr(run, name)) not in shown])
        for run in runs
    ]


def _without(run: Run, names: Sequence[str]) -> Run:
    nothing: dict[str, Any] = dict.fromkeys(names)
    return replace(run, **nothing)


def _with_paths(runs: Sequence[Run], say: Callable[[str], None]) -> list[Run]:
    """Fuse again what the clients of the first seed have sent, where they have kept it."""
    fused: dict[int, Run] = {}
    for group in same_but_seed(runs):
        able = [
            run
            for run in group
            if run.status == COMPLETED and run.folder and can_fuse_again(run.folder, run.settings)
        ]
        if able:
            run = min(able, key=lambda run: -1 if run.seed is None else run.seed)
            assert run.folder is not None
            say(f"fusing again, step by step, what the clients of {run.name} have sent")
            fusion, neurons = fuse_again(run.folder)
            fused[id(run)] = replace(run, fusion=fusion, neurons=neurons)
    return [fused.get(id(run), run) for run in runs]


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
