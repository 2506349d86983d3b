"""The ``paper`` node of a recipe: a published table, and which runs belong into its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedhet.common.errors import (
    ConfigError,
    require_choice,
    require_known_keys,
    require_whole,
)
from fedhet.report.layout import Layout, Line, Published, split_lines
from fedhet.report.names import method_title
from fedhet.report.run_data import Run, flat
from fedhet.report.statistics import LATE_EVALUATIONS, NAMES, TO_TARGET, Figure, percent

KNOWN = (  # name: of the package of reproductions/ with the paper's own figures
    *("name", "source", "metric", "target", "targets", "published_target"),
    *("unit", "round", "evaluations", "note", "columns", "rows"),
)
KNOWN_IN_ROW = ("runs", "published", "not_run")


@dataclass(frozen=True)
class Paper:
    """A published table; its columns and rows have labels."""

    source: str  # where it is published
    figure: Figure  # what it shows
    note: str  # shown above it
    targets: tuple[float, ...]  # accuracies for rounds and bytes to a target
    columns: Mapping[str, Mapping[str, Any]]  # the settings that select a column's runs
    rows: Mapping[str, PaperRow]


@dataclass(frozen=True)
class FigureByTarget(Figure):
    """Rounds or bytes to each of several targets, accuracies in [0, 1]."""

    targets: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The figure in words."""
        return f"{NAMES[self.name]} {', '.join(map(percent, self.targets))}"


@dataclass(frozen=True)
class PublishedByTarget(Published):
    """The paper's numbers for several targets; ``text`` has them all."""

    parts: tuple[Published | None, ...] = ()


@dataclass(frozen=True)
class PaperRow:
    """A row; ``runs`` None: none of our runs belongs there."""

    runs: Mapping[str, Any] | None
    published: tuple[Published | None, ...]
    not_run: str


def read_paper(node: Mapping[str, Any]) -> Paper:
    """Read a ``paper`` node; what is wrong is a ConfigError with the key and what is allowed."""
    require_known_keys("paper", map(str, node), KNOWN)
    metric = require_choice("paper.metric", node.get("metric", "accuracy"), NAMES)
    targets = tuple(float(value) for value in node.get("targets") or ())
    by_target = targets if metric in TO_TARGET and node.get("target") is None else ()
    one_target = metric in TO_TARGET and not by_target
    target = node.get("target") if one_target else None
    if one_target and not isinstance(target, float):
        raise ConfigError(
            f"paper.metric={metric} needs paper.target, an accuracy in [0, 1], or "
            "paper.targets, for each of which every cell has a number"
        )
    if node.get("unit") not in (None, "%"):
        raise ConfigError(f'paper.unit={node["unit"]} is unknown; allowed: "%", null')
    last_round = node.get("round")
    if last_round is not None and (not isinstance(last_round, int) or last_round < 1):
        raise ConfigError(f"paper.round={last_round} must be a whole number of at least 1, or null")
    evaluations = require_whole(
        "paper.evaluations", node.get("evaluations", LATE_EVALUATIONS), low=1
    )
    if "evaluations" in node and metric != "late_accuracy":
        raise ConfigError(
            f"paper.evaluations={evaluations} is of paper.metric=late_accuracy, not of {metric}"
        )
    columns = {str(label): flat(keys) for label, keys in _mapping(node, "columns").items()}
    rows = {
        str(label): _read_row(str(label), row, len(columns), len(by_target))
        for label, row in _mapping(node, "rows").items()
    }
    figure = Figure(metric, target, node.get("unit") == "%", last_round, evaluations)
    if by_target:
        figure = FigureByTarget(metric, last_round=last_round, targets=by_target)
    if (theirs := node.get("published_target")) is not None:
        for label, row in rows.items():
            numbers = tuple(each and replace(each, target=float(theirs)) for each in row.published)
            rows[label] = replace(row, published=numbers)
    return Paper(
        source=str(node.get("source", "the paper")),
        figure=figure,
        note=str(node.get("note", "")),
        targets=targets or ((float(node["target"]),) if node.get("target") is not None else ()),
        columns=columns,
        rows=rows,
    )


def _mapping(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = node.get(key)
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"paper.{key}={value} must be a mapping from labels to settings")
    return value


def _read_row(label: str, row: Any, columns: int, targets: int) -> PaperRow:
    where = f"paper.rows.{label}"
    if not isinstance(row, Mapping) or not set(row) <= set(KNOWN_IN_ROW):
        raise ConfigError(f"{where}={row} must be a mapping with {', '.join(KNOWN_IN_ROW)}")
    published = row.get("published")
    if not isinstance(published, list) or len(published) != columns:
        raise ConfigError(
            f"{where}.published={published} must list {columns} numbers, one per column "
            "(null: none)"
        )
    return PaperRow(
        runs=None if row.get("runs") is None else flat(row["runs"]),
        published=tuple(_read_cell(where, value, targets) for value in published),
        not_run=str(row.get("not_run", "")),
    )


def _read_cell(where: str, value: Any, targets: int) -> Published | None:
    """Return a cell's number, or with several targets its numbers."""
    if value is None or not targets:
        return _read_number(where, value)
    if not isinstance(value, list) or len(value) != targets:
        raise ConfigError(f"{where}.published has {value}: a list of {targets}, one per target")
    parts = tuple(_read_number(where, part) for part in value)
    return PublishedByTarget(None, text=" / ".join(map(str, value)), parts=parts)


def _read_number(where: str, value: Any) -> Published | None:
    if value is None:
        return None
    if isinstance(value, str):
        return Published(None, text=value)
    pair = value if isinstance(value, list) else [value, None]
    if len(pair) != 2 or not all(part is None or isinstance(part, int | float) for part in pair):
        raise ConfigError(f"{where}.published has {value}: a number, [mean, spread], text or null")
    return Published(*pair)


def paper_layout(runs: Sequence[Run], paper: Paper) -> Layout:
    """Lay out runs as the paper's table; rows for other methods follow."""
    lines: list[Line] = []
    notes: list[str] = []
    placed: set[int] = set()
    for label, row in paper.rows.items():
        cells = []
        for keys, published in zip(paper.columns.values(), row.published, strict=True):
            members = [] if row.runs is None else _select(runs, {**row.runs, **keys})
            placed |= {id(run) for run in members}
            cells.append((members, published))
        method = (row.runs or {}).get("strategy", label)
        lines += split_lines(label, str(method), cells, notes, row.not_run)
    left = [run for run in runs if id(run) not in placed]
    for method in dict.fromkeys(run.method for run in left):
        own = [run for run in left if run.method == method]
        others = [(_select(own, keys), None) for keys in paper.columns.values()]
        placed |= {id(run) for members, _ in others for run in members}
        if any(members for members, _ in others):
            lines += split_lines(
                f"{method_title(method)} (not in the paper's table)", method, others, notes
            )
    if outside := [run.name for run in runs if id(run) not in placed]:
        notes.append(f"In no column of the paper's table, and so not shown: {', '.join(outside)}.")
    rounds = sorted({int(run.settings.get("rounds") or 0) for run in runs})
    wanted = paper.figure.last_round
    if wanted is not None and rounds and rounds[0] < wanted:
        shown = ", ".join(map(str, rounds))
        notes.append(f"The paper's numbers are after {wanted} rounds; the runs have {shown}.")
    return Layout(tuple(paper.columns), tuple(lines), tuple(dict.fromkeys(notes)))


def _select(runs: Sequence[Run], keys: Mapping[str, Any]) -> list[Run]:
    return [run for run in runs if selects(keys, run.method, run.settings)]


def selects(keys: Mapping[str, Any], method: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a run has these settings; ``strategy`` is the method's name."""
    have = {**settings, "strategy": method}
    return all(_equal(value, have.get(key)) for key, value in keys.items())


def _equal(wanted: object, found: object) -> bool:
    if isinstance(wanted, int | float) and isinstance(found, int | float):
        return abs(wanted - found) <= 1e-9 * max(abs(wanted), abs(found))
    return wanted == found if wanted is None or found is None else str(wanted) == str(found)
