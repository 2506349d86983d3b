"""Recomputes the numbers of docs/results/*.md from the data files that their comments name.

The grammar is described in docs/results/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from fedhet.report.data_file import read_data
from fedhet.report.names import method_title
from fedhet.report.run_data import Run
from fedhet.report.statistics import NAMES, TO_TARGET, Estimate, Figure
from fedhet.tools.conformal.measure import MeasuredSets
from fedhet.tools.conformal.page import size_covering

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}")
_INTERVAL_TEXT = rf"{_NUMBER}(?: s)? \[{_NUMBER}, {_NUMBER}\]"
INLINE = re.compile(rf"({_INTERVAL_TEXT}|{_NUMBER})<!-- from: ([^>]*?) -->")
BLOCK = re.compile(r"<!-- (from: .*?|protocol) -->\n\n?\Z", re.DOTALL)
SPREAD, INTERVAL, COUNT, LEAST = "± [] n least".split()
LESS, ALL, PAPER, SKIP = "less all: paper skip".split()
HALF = 0.505  # of the last digit that is printed: stored figures are rounded themselves

Words = Sequence[str]
Number = float | None  # None: printed, but not ours


class Wrong(Exception):
    """A comment that cannot be read, or a number that the data do not give."""


@dataclass(frozen=True)
class Record:
    """A run of a report's data file, or an entry of a list in another JSON file."""

    run: Run | None
    values: Mapping[str, Any] = field(default_factory=dict)

    def has(self, key: str, text: str) -> bool:
        """Return whether a setting, or ``method``, ``seed`` or ``name``, is the text."""
        value = self.value(key)
        if key == "method":
            return text.casefold() in (value, method_title(value).casefold())
        return _same(value, text)

    def value(self, key: str) -> Any:
        """Return a setting, or ``method``, ``seed`` or ``name``; None without it."""
        if self.run is None:
            return self.values.get(key)
        own = key in ("method", "seed", "name")
        return getattr(self.run, key) if own else self.run.settings.get(key)


def _same(value: Any, text: str) -> bool:
    try:
        return abs(float(value) - float(text)) <= 1e-9 * abs(float(text))
    except (TypeError, ValueError):
        return fnmatchcase("null" if value is None else str(value), text)


@cache
def records(file: str) -> list[Record]:
    """Return the runs of ``FILE``, or the entries of ``FILE#KEY``, a list in a JSON file."""
    name, _, key = file.partition("#")
    content = json.loads((PAGES / name).read_text(encoding="utf-8"))
    if not key and "fedhet_report" in content:
        return [Record(run) for run in read_data(PAGES / name).runs]
    for part in filter(None, key.split("/")):
        content = content[int(part)] if isinstance(content, list) else content[part]
    entries = content if isinstance(content, list) else [content]
    return [Record(None, dict(_leaves(entry))) for entry in entries]


@cache  # the cells of a page ask the same again and again
def _having(file: str, key: str, text: str) -> frozenset[int]:
    """Return the places of the records that have it."""
    return frozenset(n for n, one in enumerate(records(file)) if one.has(key, text))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a JSON document by its dotted key, lists also as a whole."""
    if key and not isinstance(value, Mapping):
        yield key, value
    if not isinstance(value, Mapping | list):
        return
    for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(part, f"{key}.{name}" if key else str(name))


# name of a figure: its value of a run and an argument; None if it has none
NAMED: dict[str, Callable[[Run, str], float | None]] = {
    "drift": lambda run, tensor: run.layers and run.layers.by_tensor(run.layers.late).get(tensor),
    "figures": lambda run, key: dict(_leaves(run.figures)).get(key),
    "models": lambda run, parameters: _bytes(run) / (4 * int(parameters) * run.settings["clients"]),
    "stretch": lambda run, rounds: _stretch(run, *map(int, rounds.split("-"))),
}


def _bytes(run: Run) -> float:
    """Return the bytes of the last round, up and down."""
    return sum(run.points(column)[-1][1] for column in ("bytes_up", "bytes_down"))


def _stretch(run: Run, first: int, last: int) -> float:
    """Return the norm of the server's step over the clients' mean norm, a mean over rounds."""
    norms = dict(run.points("update_norm"))
    steps = [(r, step) for r, step in run.points("step_norm") if first <= r <= last and r in norms]
    return fmean(step / norms[r] for r, step in steps)


def figure_of(record: Record, name: str) -> float | None:
    """Return a record's figure; None if it was not measured, or the target was not reached.

    ``NAME``, ``NAME:ARGUMENT``, ``NAME@ROUND`` (later rounds are left out) and
    ``COLUMN@FIRST-LAST`` (a mean); accuracies of runs, and what ends in ``%``, in per cent.
    """
    scale = 100.0 if name.endswith("%") else 1.0
    name = name.removesuffix("%")
    value = _of_run(record.run, name) if record.run else _of_entry(record.values, name)
    return None if value is None else scale * value


def _of_entry(values: Mapping[str, Any], name: str) -> float | None:
    """Return ``KEY``; of a list ``mean:KEY``; of one over splits and levels ``mean@LEVEL:KEY``."""
    kind, _, key = name.rpartition(":")
    way, _, level = kind.partition("@")
    if way == "covering":
        parts = {part.name: values[f"{key}.{part.name}"] for part in fields(MeasuredSets)}
        return size_covering(float(level), MeasuredSets(**parts))
    value = values.get(key)
    if value is None or not kind:
        return value
    if level:
        place = values[f"{key.rpartition('.')[0]}.levels"].index(float(level))
        value = [row[place] for row in value]
    return {"mean": fmean, "median": median, "stdev": stdev}[way](value)


def _of_run(run: Run, name: str) -> float | None:
    name, _, rounds = name.partition("@")
    first, _, last = rounds.partition("-")
    kind, _, argument = name.partition(":")
    if kind in NAMED:
        return NAMED[kind](run, argument)
    if kind in NAMES and not last:
        figure = Figure(kind, percent=True, last_round=int(first) if first else None)
        if kind in TO_TARGET:
            figure = replace(figure, target=float(argument))
        elif argument:
            figure = replace(figure, evaluations=int(argument))
        found = figure.of(run)
        return found.number if found and found.reached else None
    if not rounds or not run.points(name):
        raise Wrong(f"{run.name} has no {name}@{rounds}; figures: {', '.join([*NAMES, *NAMED])}")
    values = [value for r, value in run.points(name) if int(first) <= r <= int(last or first)]
    return (100.0 if name.endswith("accuracy") else 1.0) * fmean(values)


@dataclass(frozen=True)
class Query:
    """What a number is of: files, settings of their records, and figures."""

    files: Words = ()
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)  # several values: seeds
    less: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the runs subtracted
    by: Words = ()  # settings that the cell itself has
    figures: Words = ()

    def joined(self, other: Query) -> Query:
        """Return this query narrowed down by another, whose words come first."""
        return Query(
            other.files or self.files,
            {**self.chosen, **other.chosen},
            {**self.less, **other.less},
            (),
            other.figures or self.figures,
        )

    def numbers(self) -> list[Number]:
        """Return the numbers that a cell has, in their order."""
        found: list[Number] = []
        values: list[float] = []
        for word, follows in zip(self.figures, [*self.figures[1:], ""], strict=True):
            if word == PAPER:
                found.append(None)
            elif word == SPREAD:
                found += [stdev(values)] if len(values) > 1 else []
            elif word == INTERVAL:
                found += Estimate(values).interval or (None, None)
            elif word == COUNT:
                found.append(len(values))
            elif word == LEAST:
                found.append(min(values))
            else:
                values = self._values(word)
                each = any(len(texts) > 1 for texts in self.chosen.values())
                mean = [fmean(values)] if values and follows != LEAST else []
                found += values if each else mean
        return found

    def _values(self, name: str) -> list[float]:
        """Return a figure of each record, by seed; less that of another with the same seed."""
        if name.startswith(ALL):  # of several cells, whose runs have the same seeds
            found = [
                figure_of(record, name.removeprefix(ALL)) for record in self._records(self.chosen)
            ]
            return [value for value in found if value is not None]
        values = self._by_seed(name, self.chosen)
        if self.less:
            others = self._by_seed(name, {**self.chosen, **self.less})
            values = {seed: values[seed] - others[seed] for seed in values if seed in others}
        return list(values.values())

    def _records(self, chosen: Mapping[str, Sequence[str]]) -> list[Record]:
        found = []
        for file in self.files:
            each = [set().union(*(_having(file, key, t) for t in chosen[key])) for key in chosen]
            found += [one for n, one in enumerate(records(file)) if all(n in had for had in each)]
        if not found:
            raise Wrong(f"no record of {self.files} has {chosen}")
        return found

    def _by_seed(self, name: str, chosen: Mapping[str, Sequence[str]]) -> dict[Any, float]:
        found = self._records(chosen)
        if len({record.value("seed") for record in found}) < len(found):
            raise Wrong(f"several records of {self.files} have {chosen} and the same seed")
        values = {record.value("seed"): figure_of(record, name) for record in found}
        known = {seed: value for seed, value in values.items() if value is not None}
        return dict(sorted(known.items(), key=str)) if len(known) == len(values) else {}


def _selectors(words: Words) -> dict[str, list[str]]:
    return {key: [value] for key, _, value in (word.partition("=") for word in words)}


def query_of(text: str) -> Query:
    """Read ``FILE.json ... KEY=VALUE ... FIGURE ... less KEY=VALUE ...``, or ``by KEY ...``."""
    words = text.split()
    if words[:1] == ["by"]:
        return Query(by=words[1:])
    end = words.index(LESS) if LESS in words else len(words)
    files = [word for word in words[:end] if ".json" in word]
    chosen = [word for word in words[:end] if "=" in word]
    figures = [word for word in words[:end] if word not in files and word not in chosen]
    return Query(files, _selectors(chosen), _selectors(words[end + 1 :]), (), figures)


@dataclass(frozen=True)
class Table:
    """A Markdown table and the comment above it; ``source`` is empty without one."""

    page: str
    heading: str
    source: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(path: Path) -> Iterator[Table]:
    """Yield the tables of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for found in re.finditer(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        before = text[: found.start()]
        headings = re.findall(r"^#+ (.*)$", before, re.MULTILINE)
        comment = BLOCK.search(before[before.rfind("<!--") :])
        header, _, *rows = (_cells(line) for line in found[0].splitlines())
        yield Table(path.name, headings[-1], comment[1] if comment else "", header, rows)


def _cells(line: str) -> list[str]:
    cells = (re.sub(r"<!--.*?-->", "", cell) for cell in line.strip().strip("|").split("|"))
    return [cell.replace("**", "").strip() for cell in cells]


def wrong_cells(table: Table) -> list[str]:
    """Return what of a table the data do not give."""
    first, *lines = table.source.removeprefix("from: ").splitlines()
    named = {}
    for line in lines:
        label, equals, text = line.strip().rpartition(" = ")
        if not equals:
            raise Wrong(f"{line!r} must be LABEL = WORDS")
        named[label] = query_of(text)
    if unknown := set(named) - set(table.header) - {row[0] for row in table.rows}:
        raise Wrong(f"no column or row is called {sorted(unknown)}")
    found = []
    for row in table.rows:
        base = query_of(first)
        for label, cell in zip(table.header, row, strict=True):
            base = base.joined(_of_labels(named.get(label, Query()).by, cell))
        base = base.joined(named.get(row[0], Query()))
        for label, cell in zip(table.header[1:], row[1:], strict=True):
            column = named.get(label, Query())
            query = base.joined(column).joined(Query(figures=named.get(row[0], Query()).figures))
            query = replace(query, figures=[SKIP]) if SKIP in column.figures else query
            if not column.by and (said := wrong_cell(query, cell)):
                found.append(f"{' | '.join(row[:3])} · {label}: {said}")
    return found


def _of_labels(keys: Words, cell: str) -> Query:
    """Return what a row's label selects: ``5, .1`` by two keys, ``0, 1, 2`` or ``mean`` by seed."""
    if cell in ("", "mean"):
        return Query()
    values = [value.strip() for value in cell.split(",")]
    if len(keys) == len(values) > 1:
        return Query(chosen={key: [value] for key, value in zip(keys, values, strict=True)})
    return Query(chosen={key: values if key == "seed" else [cell] for key in keys})


def wrong_cell(query: Query, cell: str) -> str:
    """Return how a cell's numbers differ from the data's; empty if they do not."""
    if SKIP in query.figures or not cell:
        return ""
    if not query.figures:
        raise Wrong("the comment names no figure of it")
    printed = NUMBER.findall(cell)
    expected = query.numbers()
    if len(printed) != len(expected):
        return f"{cell!r} has {len(printed)} numbers, the data {expected}"
    wrong = [
        f"{text} is {number:.6g}"
        for text, number in zip(printed, expected, strict=True)
        if number is not None and not is_rounded(text, number)
    ]
    return ", ".join(wrong)


def is_rounded(text: str, number: float) -> bool:
    """Return whether a printed number is the number, rounded to the digits that are printed."""
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - number) <= HALF * 10.0**-digits


def wrong_prose(path: Path) -> list[str]:
    """Return the numbers before an inline comment that the data do not give."""
    text = path.read_text(encoding="utf-8")
    found = [(m[1], query_of(m[2])) for m in INLINE.finditer(text)]
    if len(found) < len(re.findall(r"(?<!\n)<!-- from: ", text)):
        raise Wrong(f"{path.name}: a comment within a line does not follow a number")
    said = [(number, wrong_cell(query, number)) for number, query in found]
    return [f"{number}: {words}" for number, words in said if words]
