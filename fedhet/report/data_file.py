"""The data file (report.json): everything a page is made from, kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import lcm
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError
from fedhet.common.metrics import is_of_new_model
from fedhet.report.layer_data import LayerFigures
from fedhet.report.run_data import LATE_ROUNDS, Column, Run
from fedhet.report.site_data import SiteFigures

FORMAT = 2
MOST_POINTS = 40_000  # of all diagnostics together, about 300 kB
NEVER_THINNED = (  # tables have figures of single rounds, and curves an x of each
    *("round", "accuracy", "loss", "client_accuracy", "client_loss"),
    *("bytes_up", "bytes_down", "elapsed_seconds", "simulated_seconds"),
)
AGREEMENT = ("norm_ratio", "update_cosine", "drift_diversity")  # of a round's updates
_ALLOWED = "name a report.json, or folders of runs"


@dataclass(frozen=True)
class Origin:
    """A source of runs: the folder of a sweep or of a run."""

    name: str  # of the folder
    command: str = ""  # the command line, as far as it is known
    failures: Sequence[str] = ()  # jobs of the sweep without a results directory, and why
    unfinished: str = ""  # of a sweep that has not ended: how far it has come
    # the words that its jobs differ in, such as partition.alpha
    varied: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True)
class Partition:
    """How many examples of each class each client holds."""

    title: str
    settings: Mapping[str, Any]  # they identify the partition
    class_names: Sequence[str] = ()
    counts: Sequence[Sequence[int]] = ()  # (clients, classes), of the first clients if many
    clients: int = 0  # N
    error: str = ""  # why there are no counts


@dataclass(frozen=True)
class ReportData:
    """What a page is made from; an empty title, targets or keys are chosen from the runs."""

    runs: Sequence[Run]  # failed ones included
    origins: Sequence[Origin] = ()  # a run's ``source`` is an index of these
    partitions: Sequence[Partition] = ()
    title: str = ""
    targets: Sequence[float] = ()  # accuracies to reach
    by: Sequence[str] = ()  # keys whose values make the columns
    baseline: str = ""  # a row's label or method, with which the others are compared
    every: int = 1  # one round in ``every`` of the diagnostics is kept


def merged(parts: Sequence[ReportData]) -> ReportData:
    """Return the data of several sources as one; the first title, targets and keys count."""
    runs: list[Run] = []
    origins: list[Origin] = []
    for part in parts:
        runs += [replace(run, source=run.source + len(origins)) for run in part.runs]
        origins += part.origins
    partitions = [partition for part in parts for partition in part.partitions]
    chosen = {
        name: next(filter(None, (getattr(part, name) for part in parts)), getattr(parts[0], name))
        for name in ("title", "targets", "by", "baseline")
    }
    every = lcm(*(part.every for part in parts))
    return ReportData(runs, origins, partitions, every=every, **chosen)


def thinned(data: ReportData) -> ReportData:
    """Return data with fewer rounds of the diagnostics if these have more than MOST_POINTS.

    Of data that were thinned before, every second, third, ... of the rounds that they have.
    """
    points = sum(len(values) for run in data.runs for values in run.columns.values())
    every = data.every * max(1, -(-points // (MOST_POINTS * data.every)))
    if every == 1:
        return data
    runs = [replace(run, columns=_thinned_columns(run, every)) for run in data.runs]
    return replace(data, runs=runs, every=every)


def _thinned_columns(run: Run, step: int) -> dict[str, Column]:
    rounds, own, found = run.columns.get("round", ()), run.own_metrics, dict(run.columns)
    for name, values in run.columns.items():
        if name in NEVER_THINNED or is_of_new_model(name, own) or len(set(values[1:])) <= 1:
            continue
        late = LATE_ROUNDS if name in AGREEMENT else 1  # over which a table has its mean
        found[name] = [
            value if round is None or round % step == 0 or place >= len(rounds) - late else None
            for place, (round, value) in enumerate(zip(rounds, values, strict=True))
        ]
    return found


def to_text(data: ReportData) -> str:
    """Return the data file's text; settings that all runs share are written once."""
    readable = [run.settings for run in data.runs if run.settings]
    first = readable[0] if readable else {}
    common = {k: v for k, v in first.items() if all((k, v) in s.items() for s in readable)}
    papers: list[Any] = []
    content = {"fedhet_report": FORMAT, **vars(data), "common": common, "papers": papers}
    content["runs"] = [_encoded(run, common, papers) for run in data.runs]
    content["origins"] = [vars(origin) for origin in data.origins]
    content["partitions"] = [vars(partition) for partition in data.partitions]
    lines = [f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return _compact(value)
    return "[\n" + ",\n".join(f"  {_compact(entry)}" for entry in value) + "\n ]"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=list)


def _encoded(run: Run, common: Mapping[str, Any], papers: list[Any]) -> dict[str, Any]:
    if run.paper is not None and run.paper not in papers:
        papers.append(run.paper)
    own = {key: value for key, value in run.settings.items() if key not in common}
    encoded = {
        **vars(run),
        "paper": None if run.paper is None else papers.index(run.paper),
        "settings": own if run.settings else None,
        "columns": {name: _packed(values) for name, values in run.columns.items()},
        "layers": None if run.layers == LayerFigures() else vars(run.layers),
        "sites": asdict(run.sites) if run.sites else None,
    }
    needless = [name for name in ("figures", "layers", "sites", "distrusted") if not encoded[name]]
    return {name: value for name, value in encoded.items() if name not in ("folder", *needless)}


def _packed(values: Column) -> Any:
    """Return a column; one that is constant after round 0 as ``{first, rest, count}``."""
    if len(values) > 3 and len(set(values[1:])) == 1:
        return {"first": values[0], "rest": values[1], "count": len(values)}
    return list(values)


def read_data(path: Path) -> ReportData:
    """Read a data file; another file is a ConfigError."""
    return parse(path.read_bytes(), str(path))


def parse(text: str | bytes, name: str) -> ReportData:
    """Return what a data file holds; ``name`` is for the ConfigError of another file."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} is not a data file of fedhet-report: {error}; {_ALLOWED}"
        ) from None
    version = content.get("fedhet_report") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ConfigError(
            f"{name} is not a data file of fedhet-report: it has fedhet_report={version}, allowed: "
            f"{FORMAT}; {_ALLOWED}"
        )
    try:
        return _data_of(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{name} is damaged: {type(error).__name__} {error}; write it again from its folders"
        ) from None


def _data_of(content: Mapping[str, Any]) -> ReportData:
    """Return what the content of a data file stands for; one that was changed by hand may raise."""
    papers, common = content["papers"], content["common"]
    known = {field.name for field in fields(ReportData)}
    return ReportData(
        **{key: value for key, value in content.items() if key in known}
        | {
            "runs": [_decoded(entry, common, papers) for entry in content["runs"]],
            "origins": [Origin(**entry) for entry in content["origins"]],
            "partitions": [Partition(**entry) for entry in content["partitions"]],
        }
    )


def _decoded(entry: Mapping[str, Any], common: Mapping[str, Any], papers: Sequence[Any]) -> Run:
    own, paper = entry["settings"], entry["paper"]
    layers, sites = entry.get("layers"), entry.get("sites")
    return Run(
        **{
            **entry,
            "settings": {} if own is None else {**common, **own},
            "columns": {name: _unpacked(column) for name, column in entry["columns"].items()},
            "paper": None if paper is None else papers[paper],
            "layers": LayerFigures(**(layers or {})),
            "sites": SiteFigures.from_json(sites) if sites else None,
        }
    )


def _unpacked(column: Any) -> Column:
    if isinstance(column, dict):
        return [column["first"]] + [column["rest"]] * (column["count"] - 1)
    return list(column)
