"""Lays runs out in rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from fedhet.common.results import COMPLETED
from fedhet.conf import FOLDER_KEYS, NOTES, SITE_KEYS
from fedhet.report.names import method_title
from fedhet.report.run_data import Run

Found = TypeVar("Found")

METHOD_KEYS = "strategy."
NO_COLUMN = "all runs"
MOST_COLUMNS = 12
# The best known settings: they are shown, and name a column if several keys would do.
KNOWN_KEYS = (
    *("task.name", "task.model", "task.train_size"),
    *("partition.name", "partition.alpha", "partition.classes", "partition.holdout"),
    *("clients", "participation", "rounds", "local.epochs", "local.steps", "local.batch_size"),
    *("local.lr", "local.optimizer", "local.momentum", "local.weight_decay", "local.clip"),
    *("local.drop_last", "schedule._target_", "server.lr", "strategy.aggregator._target_"),
    *("target_accuracy", "runtime.name"),
)

_TARGET = "_target_"  # the class of a group
_SIDES = ("strategy.client_sides.", "strategy.server_sides.")
_UNCLEAR = {"name", "path", "seed", "up", "down"}  # the last words of many keys
# Keys whose values are clear without a word before them, and what they are called.
_NAMED = {"task.name": "task", "partition.name": "partition", "task.model": "model"}


@dataclass(frozen=True)
class Published:
    """A number of the paper."""

    text: str = ""  # as a table shows it; empty without a number
    mean: float | None = None  # None: ours is not comparable, as with 100+ or another target


@dataclass(frozen=True)
class Cell:
    """The runs of a row and a column, equal in all but the seed.

    A row of the tables is a line of the curves.
    """

    row: str
    column: str
    method: str  # it decides the row's colour
    runs: tuple[Run, ...] = ()  # the completed ones, one per seed
    others: tuple[Run, ...] = ()  # those that are not completed
    published: tuple[Published, ...] = ()  # one for each target of the paper's table
    not_run: str = ""  # why its row has no runs, if that is intended

    @property
    def name(self) -> str:
        """Its row and column."""
        return self.row if self.column == NO_COLUMN else f"{self.row} · {self.column}"


@dataclass(frozen=True)
class Layout:
    """Cells row after row, notes about them, and the names of the keys whose values are columns."""

    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, list[Cell]]:
        """The cells of each row, by column."""
        return {row: [c for c in self.cells if c.row == row] for row in self.methods}

    @property
    def methods(self) -> dict[str, str]:
        """The method of each row."""
        return {cell.row: cell.method for cell in self.cells}

    @property
    def measured(self) -> list[Cell]:
        """The cells that have completed runs, column after column."""
        return [cell for column in self.columns for cell in self.column(column) if cell.runs]

    @property
    def completed(self) -> list[Run]:
        """The completed runs."""
        return [run for cell in self.measured for run in cell.runs]

    def column(self, name: str) -> list[Cell]:
        """Return the cells of a column, by row."""
        return [cell for cell in self.cells if cell.column == name]


def automatic_layout(
    runs: Sequence[Run], by: Sequence[str] = (), varied: Sequence[str] = ()
) -> Layout:
    """Lay out runs by method, and by the keys ``by``.

    By default these are the keys that their sweep has ``varied``, as its sweep.json says, or of
    runs that no single sweep has made those that vary within a method. The method's own
    (``strategy.*``) make rows.
    """
    methods = list(dict.fromkeys(run.method for run in runs))
    of_methods = [[run for run in runs if run.method == method] for method in methods]
    varying = _swept(varied, runs) if varied else _differing_within(of_methods)
    keys = list(by) or _fewest([key for key in varying if not key.startswith(METHOD_KEYS)], runs)
    columns = _in_order(_values(run, keys) for run in runs)
    if len(columns) > MOST_COLUMNS and not by:  # a search: what varies makes rows instead
        keys, columns = [], [()]
    labels = _labels(keys, columns) if keys else [NO_COLUMN]
    cells: list[Cell] = []
    notes: list[str] = []
    for method, own in zip(methods, of_methods, strict=True):
        members = {
            label: [run for run in own if _values(run, keys) == values]
            for label, values in zip(labels, columns, strict=True)
        }
        cells += split_row(method_title(method), method, members, notes)
    return Layout(tuple(labels), tuple(cells), tuple(notes), tuple(_names(keys)))


def _swept(words: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return the keys of settings for the words of a sweep: ``task=a,b`` varies task.name."""
    known = {key for run in runs for key in run.settings}
    names = [(word, f"{word}.name", f"{word}.{_TARGET}") for word in words if word != "seed"]
    found = [next((key for key in each if key in known), "") for each in names]
    return [key for key in found if key and _distinct(runs, [key]) > 1]


def split_row(
    label: str, method: str, members: Mapping[str, Sequence[Run]], notes: list[str]
) -> list[Cell]:
    """Return a row's cells, or those of several rows if its runs differ in more than the seed.

    ``members`` are the runs by column.
    """
    runs = [run for each in members.values() for run in each]
    keys = _fewest(_differing_within(list(members.values())), runs)
    if keys:
        notes.append(
            f"{label}: the runs of a cell differ in {', '.join(keys)}. They are not averaged over "
            "it: each value has a row of its own."
        )
    variants = _in_order(_values(run, keys) for run in runs) or [()]
    rows = [f"{label}, {suffix}" for suffix in _labels(keys, variants)] if keys else [label]
    return [
        _cell(row, column, method, [r for r in each if _values(r, keys) == variant], notes)
        for row, variant in zip(rows, variants, strict=True)
        for column, each in members.items()
    ]


def _cell(row: str, column: str, method: str, runs: Sequence[Run], notes: list[str]) -> Cell:
    """Return a cell with one run per seed: a repeated seed is not another measurement."""
    chosen: dict[int | None, Run] = {}
    for run in (run for run in runs if run.status == COMPLETED):
        if run.seed in chosen:
            notes.append(
                f"Seed {run.seed} was run twice with the same settings: {run.name} is shown, "
                f"{chosen[run.seed].name} is left out."
            )
        chosen[run.seed] = run
    others = tuple(run for run in runs if run.status != COMPLETED)
    by_seed = sorted(chosen.values(), key=lambda run: -1 if run.seed is None else run.seed)
    return Cell(row, column, method, tuple(by_seed), others)


def first_runs(layout: Layout, read: Callable[[Run], Found | None]) -> list[tuple[str, Run, Found]]:
    """Return each cell's first run for which ``read`` finds something, with its name and that."""
    found = []
    for cell in layout.cells:
        known = ((cell.name, run, each) for run in cell.runs if (each := read(run)))
        found += list(islice(known, 1))
    return found


def only_runs(layout: Layout, has: Callable[[Run], object]) -> Layout:
    """Return the layout with the runs for which ``has`` is true."""
    cells = [replace(cell, runs=tuple(filter(has, cell.runs))) for cell in layout.cells]
    return replace(layout, cells=tuple(cells))


def differing_settings(layout: Layout) -> list[str]:
    """Return the keys in which rows differ except the method's own, such as server.lr."""
    groups = [[run for cell in layout.column(c) for run in cell.runs] for c in layout.columns]
    return [key for key in _differing_within(groups) if not key.startswith(METHOD_KEYS)]


def _differing_within(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the keys in which the runs of any group differ, the known ones first."""
    skipped = _copies_of_the_seed([run for runs in groups for run in runs])
    found: set[str] = set()
    for runs in groups:
        for key in {key for run in runs for key in run.settings} - found - skipped:
            values = {_plain(run.settings.get(key)) for run in runs if _says(run, key)}
            if len(values) > 1 and not _irrelevant(key):
                found.add(key)
    places = {key: place for place, key in enumerate(KNOWN_KEYS)}
    return sorted(found, key=lambda key: (places.get(key, len(places)), key.count("."), key))


def _says(run: Run, key: str) -> bool:
    """Return whether a run has a value for a key: its own, or none because it lacks the group.

    A group that is switched off is null, and a side that it has not is not there. Another key that
    it lacks does not differ from others' values: the recipe is of an older version.
    """
    parts = key.split(".")
    if key.startswith(_SIDES) and parts[-1] == _TARGET:
        return True
    return any(".".join(parts[:size]) in run.settings for size in range(len(parts), 0, -1))


def _irrelevant(key: str) -> bool:
    return key.partition(".")[0] in (*SITE_KEYS, *NOTES) or key in ("seed", *FOLDER_KEYS)


def _copies_of_the_seed(runs: Sequence[Run]) -> set[str]:
    """Return the keys that equal the run's seed in every run, such as the sampler's seed."""
    keys = {key for run in runs for key in run.settings if key.endswith((".seed", "_seed"))}
    return {key for key in keys if all(run.settings.get(key, run.seed) == run.seed for run in runs)}


def _fewest(keys: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Leave out keys that follow from the others, as the task's mean does from its name.

    Keys that some runs lack (older versions) come last.
    """
    chosen: list[str] = []
    for key in sorted(keys, key=lambda key: not all(_says(run, key) for run in runs)):
        having = [run for run in runs if _says(run, key)]
        if _distinct(having, [*chosen, key]) > _distinct(having, chosen):
            chosen.append(key)
    return chosen


def _distinct(runs: Sequence[Run], keys: Sequence[str]) -> int:
    return len({_values(run, keys) for run in runs})


def _values(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_plain(run.settings.get(key)) for key in keys)


def _plain(value: object) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, list):
        value = ", ".join(map(str, value)) or None
    return "none" if value is None else str(value)


def _in_order(found: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Sort numbers by size, then words; what is switched off comes first, and is the baseline."""

    def place(value: str) -> tuple[int, float, str]:
        try:
            return (-1, 0.0, "") if value == "none" else (0, float(value), "")
        except ValueError:
            return (1, 0.0, value)

    return sorted(set(found), key=lambda values: list(map(place, values)))


def _labels(keys: Sequence[str], found: Sequence[Sequence[str]]) -> list[str]:
    """Return ``digits, alpha 0.1, clients 10`` for each of the values; no two are equal.

    Of a class's name a label has the last word, or else the whole name.
    """

    def label(values: Sequence[str], *, whole: bool = False) -> str:
        words = []
        for key, name, value in zip(keys, _names(keys), values, strict=True):
            shown = value.rpartition(".")[2] if key.endswith(_TARGET) and not whole else value
            words.append(shown if key in _NAMED else f"{name} {shown}")
        return ", ".join(words)

    labels = list(map(label, found))
    distinct = len(set(labels)) == len(labels)
    return labels if distinct else [label(values, whole=True) for values in found]


def _names(keys: Sequence[str]) -> list[str]:
    """Return the last word of each key, or the key if that is unclear."""
    last = [key.removesuffix(f".{_TARGET}").rpartition(".")[2] for key in keys]
    unclear = {word for word in last if last.count(word) > 1} | _UNCLEAR
    whole = [key.removesuffix(f".{_TARGET}") for key in keys]
    short = [key if word in unclear else word for key, word in zip(whole, last, strict=True)]
    return [_NAMED.get(key, name) for key, name in zip(keys, short, strict=True)]
