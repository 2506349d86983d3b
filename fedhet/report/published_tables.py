"""The ``paper`` node of a recipe: a published table, and which runs belong into its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from fedhet.common.errors import ConfigError
from fedhet.common.nested import flat
from fedhet.report.layout import Cell, Layout, Published, split_row
from fedhet.report.names import method_title
from fedhet.report.run_data import Run
from fedhet.report.statistics import LATE_EVALUATIONS, NAMES, TO_TARGET, Figure, percent

Keys = Annotated[dict[str, Any], BeforeValidator(lambda node: flat(node))]  # they select runs


class PaperRow(BaseModel, extra="forbid", frozen=True):
    """A row; ``runs`` None: none of our runs belongs there."""

    runs: Keys | None = None
    published: tuple[Any, ...]
    not_run: str = ""


class Paper(BaseModel, extra="forbid", frozen=True):
    """A published table; its columns and rows have labels."""

    name: str = ""  # of the package of reproductions/ with the paper's own figures
    source: str = "the paper"
    metric: Literal[*NAMES] = "accuracy"  # type: ignore[valid-type]
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    targets: tuple[float, ...] = ()
    published_target: float | None = None
    unit: Literal["%"] | None = None
    round: PositiveInt | None = None
    evaluations: PositiveInt | None = None
    note: str = ""
    columns: dict[str, Keys] = Field(min_length=1)
    rows: dict[str, PaperRow] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.metric in TO_TARGET and self.target is None and not self.targets:
            raise ValueError(
                f"metric={self.metric} needs target, an accuracy in (0, 1], or targets, for each "
                "of which every cell has a number"
            )
        if self.evaluations is not None and self.metric != "late_accuracy":
            raise ValueError(f"evaluations is of metric=late_accuracy, not of {self.metric}")
        for label in self.rows:
            self.published(label)
        return self

    @property
    def figure(self) -> Figure:
        """What the table shows; with several targets, every cell has a number for each of them."""
        late = self.evaluations or LATE_EVALUATIONS
        target, several = (self.target, ()) if self.target else (None, self.targets)
        if self.metric not in TO_TARGET:
            target, several = None, ()
        return Figure(self.metric, target, self.unit == "%", self.round, late, several)

    @property
    def shown_targets(self) -> tuple[float, ...]:
        """The targets of the page's table of rounds and bytes."""
        return self.targets or (() if self.target is None else (self.target,))

    def published(self, label: str) -> list[tuple[Published, ...]]:
        """Return a row's numbers, one for each column and target."""
        cells, targets = self.rows[label].published, self.figure.targets
        if len(cells) != len(self.columns):
            raise ValueError(f"rows.{label}.published must list {len(self.columns)} numbers")
        found = []
        for cell in cells:
            if targets and cell and (not isinstance(cell, list) or len(cell) != len(targets)):
                raise ValueError(f"rows.{label}.published: {cell} is no list with one per target")
            numbers = cell if targets else [cell]
            known = () if cell is None else tuple(self._number(label, each) for each in numbers)
            found.append(known)
        return found

    def _number(self, label: str, value: Any) -> Published:
        if value is None or isinstance(value, str):
            return Published(value or "")
        pair = value if isinstance(value, list) else [value, None]
        numeric = isinstance(pair[0], int | float) and isinstance(pair[-1], int | float | None)
        if len(pair) != 2 or not numeric:
            raise ValueError(
                f"rows.{label}.published: {value} is no number, [mean, spread], text or null"
            )
        mean, spread = pair
        text = f"{mean:g}" if spread is None else f"{mean:g} ± {spread:g}"
        if self.published_target is not None:
            return Published(f"{text} to {percent(self.published_target)}")
        return Published(text, mean)


def read_paper(node: Mapping[str, Any]) -> Paper:
    """Read a ``paper`` node; what is wrong is a ConfigError with the key and what is allowed."""
    try:
        return Paper.model_validate(node)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("paper", *first["loc"])))
        raise ConfigError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from None


def paper_layout(runs: Sequence[Run], paper: Paper) -> Layout:
    """Lay out runs as the paper's table; rows for other methods follow."""
    cells: list[Cell] = []
    notes: list[str] = []
    placed: set[int] = set()
    for label, row in paper.rows.items():
        members = {
            column: [] if row.runs is None else _select(runs, {**row.runs, **keys})
            for column, keys in paper.columns.items()
        }
        placed |= {id(run) for each in members.values() for run in each}
        method = str((row.runs or {}).get("strategy", label))
        numbers = dict(zip(paper.columns, paper.published(label), strict=True))
        cells += [
            replace(cell, published=numbers[cell.column], not_run=row.not_run)
            for cell in split_row(label, method, members, notes)
        ]
    left = [run for run in runs if id(run) not in placed]
    for method in dict.fromkeys(run.method for run in left):
        own = [run for run in left if run.method == method]
        members = {column: _select(own, keys) for column, keys in paper.columns.items()}
        placed |= {id(run) for each in members.values() for run in each}
        if any(members.values()):
            label = f"{method_title(method)} (not in the paper's table)"
            cells += split_row(label, method, members, notes)
    if outside := [run.name for run in runs if id(run) not in placed]:
        notes.append(f"In no column of the paper's table, and so not shown: {', '.join(outside)}.")
    rounds = sorted({int(run.settings.get("rounds") or 0) for run in runs})
    wanted = paper.figure.last_round
    if wanted is not None and rounds and rounds[0] < wanted:
        shown = ", ".join(map(str, rounds))
        notes.append(f"The paper's numbers are after {wanted} rounds; the runs have {shown}.")
    return Layout(tuple(paper.columns), tuple(cells), tuple(dict.fromkeys(notes)))


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
