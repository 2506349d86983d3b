"""The data file: all that a page is made from, small enough to be kept beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from fedhet.report.run_data import LATE_ROUNDS, Column, Run
from reproductions.feddw.classifier_data import HeadNorms, Relations
from reproductions.fedpvr.layer_data import LayerFigures
from reproductions.maecho.decoder_data import Generated
from reproductions.maecho.fusion_path import FusionPath, Neurons

FORMAT = 1
MOST_POINTS = 40_000  # of all diagnostics together, some 300 kB
NEVER_THINNED = ("round", "accuracy", "bytes_up", "bytes_down")  # rounds to a target need them all
AGREEMENT = ("norm_ratio", "update_cosine", "drift_diversity")  # of a round's updates
# What is read of a run beside its numbers, by the name of its field: of the first seed alone.
LARGE: Mapping[str, type[Any]] = {
    "relations": Relations,
    "head_norms": HeadNorms,
    "generated": Generated,
    "fusion": FusionPath,
    "neurons": Neurons,
}
PARTS: Mapping[str, type[Any]] = {**LARGE, "layers": LayerFigures}  # and of every seed
AGREEMENT_ROUNDS = LATE_ROUNDS  # over which these are averaged: not thinned either


class DataError(ConfigError):
    """A file that is none of ours."""


@dataclass(frozen=True)
class Origin:
    """Where runs are from: a sweep's folder, or a run's.

    Args:
        name: the folder's name.
        command: what was typed, as far as it is known.
        failures: jobs of the sweep that left no results directory, with their errors.
    """

    name: str
    command: str = ""
    failures: Sequence[str] = ()


@dataclass(frozen=True)
class Partition:
    """Who holds which classes.

    Args:
        title: task, flavour, parameters and seed.
        settings: by which it is recognised.
        class_names: in the order of their labels.
        counts: (clients, classes), of the first clients where there are very many.
        clients: how many there are.
        error: why there are no counts.
    """

    title: str
    settings: Mapping[str, Any]
    class_names: Sequence[str] = ()
    counts: Sequence[Sequence[int]] = ()
    clients: int = 0
    error: str = ""


@dataclass(frozen=True)
class ReportData:
    """What a page is made from.

    Args:
        runs: all of them, failed ones too.
        origins: the sources that the runs' ``source`` counts.
        partitions: of the runs.
        title: of the page; empty: chosen from the runs.
        targets: accuracies to reach; empty: chosen from the runs.
        by: keys whose values make the columns; empty: chosen from the runs.
        every: of the diagnostics every how many rounds are kept.
    """

    runs: Sequence[Run]
    origins: Sequence[Origin] = ()
    partitions: Sequence[Partition] = ()
    title: str = ""
    targets: Sequence[float] = ()
    by: Sequence[str] = ()
    every: int = 1


def read_data(path: Path) -> ReportData:
    """Read a data file.

    Raises:
        DataError: if it is another file.
    """
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, name: str) -> ReportData:
    """Return what a data file says; ``name`` is for the error.

    Raises:
        DataError: if it is another file.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{name} is no data file of fedhet-report: {error}") from error
    if not isinstance(content, dict) or content.get("fedhet_report") != FORMAT:
        raise DataError(
            f"{name} is no data file of fedhet-report: it lacks fedhet_report={FORMAT}; give a "
            "report.json, or folders of runs"
        )
    return _from_content(content)


# ---- writing -------------------------------------------------------------------------------------


def to_text(data: ReportData) -> str:
    """Return the data file's text."""
    every = max(data.every, thinning(data.runs))
    runs = thinned(data.runs, every)
    common = _common(run.settings for run in runs)
    papers: list[Any] = []
    listed = [_run_content(run, common, papers) for run in runs]
    content = {
        "fedhet_report": FORMAT,
        "title": data.title,
        "targets": list(data.targets),
        "by": list(data.by),
        "every": every,
        "origins": [vars(origin) for origin in data.origins],
        "papers": papers,
        "common": common,
        "runs": listed,
        "partitions": [vars(partition) for partition in data.partitions],
    }
    lines = [f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return _compact(value)
    return "[\n" + ",\n".join(f"  {_compact(entry)}" for entry in value) + "\n ]"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=list)


def _common(all_settings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all runs share, as far as these could be read."""
    readable = [settings for settings in all_settings if settings]
    if not readable:
        return {}
    first, *others = readable
    absent = object()
    return {
        key: value
        for key, value in first.items()
        if all(other.get(key, absent) == value for other in others)
    }


def _run_content(run: Run, common: Mapping[str, Any], papers: list[Any]) -> dict[str, Any]:
    if run.paper is not None and run.paper not in papers:
        papers.append(run.paper)
    own = {key: value for key, value in run.settings.items() if key not in common}
    large = {name: getattr(run, name) for name in PARTS}
    return {
        "name": run.name,
        "source": run.source,
        "method": run.method,
        "seed": run.seed,
        "status": run.status,
        "error": run.error,
        "paper": None if run.paper is None else papers.index(run.paper),
        "settings": own if run.settings else None,
        "summary": run.summary,
        "refusals": list(run.refusals),
        "columns": {name: _packed(values) for name, values in run.columns.items()},
        **{name: vars(found) for name, found in large.items() if found is not None},
    }


def thinning(runs: Sequence[Run]) -> int:
    """Return of how many rounds of the diagnostics one is kept: more than 1 for very many."""
    points = sum(len(values) for run in runs for values in run.columns.values())
    return max(1, -(-points // MOST_POINTS))


def thinned(runs: Sequence[Run], step: int) -> list[Run]:
    """Keep every step-th round of the diagnostics; all late ones where their mean is shown."""
    if step == 1:
        return list(runs)
    return [replace(run, columns=_thinned_columns(run.columns, step)) for run in runs]


def _thinned_columns(columns: Mapping[str, Column], step: int) -> dict[str, Column]:
    rounds = columns.get("round", ())
    kept = {number for number, round in enumerate(rounds) if round is None or round % step == 0}
    kept.add(len(rounds) - 1)
    late = kept.union(range(len(rounds) - AGREEMENT_ROUNDS, len(rounds)))

    def thin(name: str, values: Column) -> Column:
        if name in NEVER_THINNED or len(set(values[1:])) <= 1:
            return values
        shown = late if name in AGREEMENT else kept
        return [value if number in shown else None for number, value in enumerate(values)]

    return {name: thin(name, values) for name, values in columns.items()}


def _packed(values: Column) -> Any:
    """Return a column; one that is the same in all rounds but the 0th as ``[0th, n, value]``."""
    rest = set(values[1:])
    if len(values) > 3 and len(rest) == 1:
        return {"first": values[0], "rest": values[1], "count": len(values)}
    return list(values)


# ---- reading -------------------------------------------------------------------------------------


def _unpacked(column: Any) -> Column:
    if isinstance(column, dict):
        return [column["first"]] + [column["rest"]] * (column["count"] - 1)
    return list(column)


def _from_content(content: Mapping[str, Any]) -> ReportData:
    papers, common = content["papers"], content["common"]
    return ReportData(
        runs=[_run_of(entry, common, papers) for entry in content["runs"]],
        origins=[Origin(**entry) for entry in content["origins"]],
        partitions=[Partition(**entry) for entry in content["partitions"]],
        title=content["title"],
        targets=content["targets"],
        by=content["by"],
        every=content["every"],
    )


def _run_of(entry: Mapping[str, Any], common: Mapping[str, Any], papers: Sequence[Any]) -> Run:
    values = dict(entry)
    own, paper = values.pop("settings"), values.pop("paper")
    columns = values.pop("columns")
    large = {name: kind(**values.pop(name)) for name, kind in PARTS.items() if values.get(name)}
    return Run(
        **values,
        settings={} if own is None else {**common, **own},
        columns={name: _unpacked(column) for name, column in columns.items()},
        paper=None if paper is None else papers[paper],
        **large,
    )


def merged(parts: Sequence[ReportData]) -> ReportData:
    """Return several sources' data as one; the first that has a title or targets decides."""
    runs: list[Run] = []
    origins: list[Origin] = []
    for part in parts:
        runs += [replace(run, source=run.source + len(origins)) for run in part.runs]
        origins += part.origins
    return ReportData(
        runs=runs,
        origins=origins,
        partitions=[partition for part in parts for partition in part.partitions],
        title=next((part.title for part in parts if part.title), ""),
        targets=next((part.targets for part in parts if part.targets), ()),
        by=next((part.by for part in parts if part.by), ()),
        every=max(part.every for part in parts),
    )
