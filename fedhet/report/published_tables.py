"""The ``paper`` node of a recipe: which runs make a published table, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedhet.report.layout import Layout, Line, Published, split_lines
from fedhet.report.run_data import Run, flat
from fedhet.report.statistics import NAMES, TO_TARGET, Figure, percent

KNOWN = (
    "source",
    "metric",
    "target",
    "targets",
    "published_target",
    "unit",
    "round",
    "note",
    "columns",
    "rows",
)
KNOWN_IN_ROW = ("runs", "published", "not_run")


class PaperError(ValueError):
    """A ``paper`` node that says nothing clear."""


@dataclass(frozen=True)
class Paper:
    """A published table.

    Args:
        source: where it is published.
        figure: what the table shows.
        note: what a reader has to know beside the numbers.
        targets: accuracies for rounds and bytes to a target.
        columns: by label, the settings that select a column's runs.
        rows: by label, the row.
    """

    source: str
    figure: Figure
    note: str
    targets: tuple[float, ...]
    columns: Mapping[str, Mapping[str, Any]]
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
    """A row; ``runs`` None: nothing of ours belongs there."""

    runs: Mapping[str, Any] | None
    published: tuple[Published | None, ...]
    not_run: str


def read_paper(node: Mapping[str, Any]) -> Paper:
    """Check a ``paper`` node.

    Raises:
        PaperError: naming the key, its value and what is allowed.
    """
    if unknown := sorted(set(map(str, node)) - set(KNOWN)):
        raise PaperError(f"paper.{unknown[0]} is unknown; allowed: {', '.join(KNOWN)}")
    metric, target = node.get("metric", "accuracy"), node.get("target")
    if metric not in NAMES:
        raise PaperError(f"paper.metric={metric} is unknown; allowed: {', '.join(NAMES)}")
    targets = tuple(float(value) for value in node.get("targets") or ())
    by_target = targets if metric in TO_TARGET and target is None else ()
    if metric in TO_TARGET and not by_target and not isinstance(target, float):
        raise PaperError(
            f"paper.metric={metric} needs paper.target, an accuracy in [0, 1], or paper.targets, "
            "for each of which every cell has a number"
        )
    unit = node.get("unit")
    if unit not in (None, "%"):
        raise PaperError(f'paper.unit={unit} is unknown; allowed: "%", or none')
    columns = {str(label): flat(keys) for label, keys in _mapping(node, "columns").items()}
    rows = {
        str(label): _read_row(str(label), row, len(columns), len(by_target))
        for label, row in _mapping(node, "rows").items()
    }
    wanted = target if metric in TO_TARGET else None
    figure = Figure(metric, wanted, unit == "%", _round(node))
    if by_target:
        figure = FigureByTarget(metric, last_round=_round(node), targets=by_target)
    if (theirs := node.get("published_target")) is not None:
        rows = {label: _to_their_target(row, float(theirs)) for label, row in rows.items()}
    return Paper(
        source=str(node.get("source", "the paper")),
        figure=figure,
        note=str(node.get("note", "")),
        targets=targets or ((float(target),) if target is not None else ()),
        columns=columns,
        rows=rows,
    )


def _to_their_target(row: PaperRow, target: float) -> PaperRow:
    """Return the row with the paper's numbers to the accuracy that they are to."""
    numbers = tuple(
        None if each is None else replace(each, target=target) for each in row.published
    )
    return replace(row, published=numbers)


def _mapping(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = node.get(key)
    if not isinstance(value, Mapping) or not value:
        raise PaperError(f"paper.{key}={value} must be a mapping from labels to settings")
    return value


def _round(node: Mapping[str, Any]) -> int | None:
    value = node.get("round")
    if value is not None and (not isinstance(value, int) or value < 1):
        raise PaperError(f"paper.round={value} must be a whole number of at least 1, or null")
    return value


def _read_row(label: str, row: Any, columns: int, targets: int) -> PaperRow:
    where = f"paper.rows.{label}"
    if not isinstance(row, Mapping) or not set(row) <= set(KNOWN_IN_ROW):
        raise PaperError(f"{where}={row} must be a mapping with {', '.join(KNOWN_IN_ROW)}")
    published = row.get("published")
    if not isinstance(published, list) or len(published) != columns:
        raise PaperError(
            f"{where}.published={published} must list {columns} numbers, one a column (null: none)"
        )
    runs = row.get("runs")
    return PaperRow(
        runs=None if runs is None else flat(runs),
        published=tuple(_read_cell(where, value, targets) for value in published),
        not_run=str(row.get("not_run", "")),
    )


def _read_cell(where: str, value: Any, targets: int) -> Published | None:
    """Return a cell's number, or with several targets its numbers for these."""
    if value is None or not targets:
        return _read_number(where, value)
    if not isinstance(value, list) or len(value) != targets:
        raise PaperError(f"{where}.published has {value}: a list of {targets}, one a target")
    parts = tuple(_read_number(where, part) for part in value)
    return PublishedByTarget(None, text=" / ".join(map(str, value)), parts=parts)


def _read_number(where: str, value: Any) -> Published | None:
    if value is None:
        return None
    if isinstance(value, str):
        return Published(None, text=value)
    pair = value if isinstance(value, list) else [value, None]
    if len(pair) != 2 or not all(part is None or isinstance(part, int | float) for part in pair):
        raise PaperError(f"{where}.published has {value}: a number, [mean, spread], text or null")
    return Published(pair[0], pair[1])


def paper_layout(runs: Sequence[Run], paper: Paper) -> Layout:
    """Lay out runs as the paper's table; rows for methods that it does not have follow."""
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
        cells = [(_select(own, keys), None) for keys in paper.columns.values()]
        placed |= {id(run) for members, _ in cells for run in members}
        if any(members for members, _ in cells):
            lines += split_lines(f"{method} (not in the paper's table)", method, cells, notes)
    if outside := [run.name for run in runs if id(run) not in placed]:
        notes.append(f"In no column of the paper's table, and so not shown: {', '.join(outside)}.")
    notes += _too_short(runs, paper.figure.last_round)
    return Layout(tuple(paper.columns), tuple(lines), tuple(dict.fromkeys(notes)))


def _too_short(runs: Sequence[Run], wanted: int | None) -> list[str]:
    found = sorted({int(run.settings.get("rounds") or 0) for run in runs})
    if wanted is None or not found or found[0] >= wanted:
        return []
    shown = ", ".join(map(str, found))
    return [f"The paper's numbers are after {wanted} rounds; the runs have {shown}."]


def _select(runs: Sequence[Run], keys: Mapping[str, Any]) -> list[Run]:
    return [run for run in runs if selects(keys, run.method, run.settings)]


def selects(keys: Mapping[str, Any], method: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a run has these settings; ``strategy`` is the method's name."""
    have = {**settings, "strategy": method}
    return all(_equal(value, have.get(key)) for key, value in keys.items())


def _equal(wanted: object, found: object) -> bool:
    numbers = (int, float)
    if isinstance(wanted, numbers) and isinstance(found, numbers):
        return abs(wanted - found) <= 1e-9 * max(abs(wanted), abs(found))
    return wanted == found if wanted is None or found is None else str(wanted) == str(found)
