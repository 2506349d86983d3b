"""Reads results directories into small values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedhet.common.files import subfolders
from fedhet.common.metrics import own_names
from fedhet.common.nested import flat
from fedhet.common.results import (
    BY_CLIENT,
    COMPLETED,
    CONFIG,
    DIVERGED,
    FAILED,
    LOG,
    METRICS,
    STOPPED,
    SUMMARY,
    Row,
    check_rows,
    read_config,
    read_rows,
    read_summary,
)
from fedhet.conf import method_name
from fedhet.report.layer_data import LayerFigures, read_layers
from fedhet.report.site_data import SiteFigures, read_site_figures

UNFINISHED = "unfinished"  # it has no summary.json, or other files than that says
RUNNING = "running"  # the same while it goes on, as a live page has it
NOT_SEARCHED = ("checkpoints", "client_state", "report")
MOST_REFUSALS = 5
SIGNIFICANT_DIGITS = 6
DISTRUST = ("left_out", "down_weighted", "standing_out")  # of a row: ids, or values by id
_MEASURED = ("accuracy", "loss")
LATE_ROUNDS = 10  # the last rounds, over which diagnostics are averaged

Column = Sequence[float | None]
Settings = Mapping[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Run:
    """One run.

    ``columns`` are those of metrics.jsonl, all as long as ``columns["round"]``; ``clients`` is the
    number of aggregated clients. ``figures`` holds what packages of ``reproductions/`` collected.
    """

    name: str  # of its folder
    source: int  # index into the report's sources
    method: str
    seed: int | None
    status: str  # completed, diverged, stopped, failed or unfinished
    error: str = ""  # why it is not completed, or what is wrong with its files
    settings: Settings = field(default_factory=dict)  # config.yaml with dotted keys
    columns: Mapping[str, Column] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)  # without status and error
    refusals: Sequence[str] = ()  # the first refused replies
    # by name of DISTRUST and client id, in how many rounds
    distrusted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    paper: Mapping[str, Any] | None = None  # the node of its recipe
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by package
    layers: LayerFigures = field(default_factory=LayerFigures)  # of diagnostics.layers and .cka
    sites: SiteFigures | None = None  # of evaluation.per_client or fedhet-evaluate --by-site
    folder: Path | None = field(default=None, compare=False)  # None: from a data file

    @property
    def own_metrics(self) -> list[str]:
        """The names of the user's own metrics in ``columns``."""
        return own_names(map(str, self.settings.get("evaluation.metrics") or ()))

    def points(self, column: str) -> list[tuple[int, float]]:
        """Return (round, value) where the column has a value; see ``at_clients``."""
        of_clients = column in _MEASURED and self.at_clients
        return self.stored(f"client_{column}" if of_clients else column)

    def stored(self, name: str) -> list[tuple[int, float]]:
        """Return (round, value) of a column of metrics.jsonl, as the file has it."""
        rounds = self.columns.get("round", ())
        values = self.columns.get(name, [None] * len(rounds))
        pairs = zip(rounds, values, strict=True)
        return [(int(r), float(v)) for r, v in pairs if r is not None and v is not None]

    @property
    def at_clients(self) -> bool:
        """Whether the clients alone have measured the model: its accuracy and loss are theirs."""

        def known(where: str) -> bool:
            columns = (self.columns.get(f"{where}{name}", ()) for name in _MEASURED)
            return any(value is not None for column in columns for value in column)

        return known("client_") and not known("")

    def spent(self, column: str) -> dict[int, float]:
        """Return what was spent until the end of each round; nothing if it was not measured.

        ``bytes`` are those of all clients, up and down; other columns are sums already.
        """
        if column != "bytes":
            measured = dict(self.points(column))
            return {0: 0.0, **measured} if measured else {}
        sent = Counter[int]()
        for round, value in self.points("bytes_up") + self.points("bytes_down"):
            sent[round] += int(value) if round > 0 else 0
        rounds = [round for round, _ in self.points("round")]
        return dict(zip(rounds, accumulate(float(sent[r]) for r in rounds), strict=True))


ON_TEST_SET, AT_CLIENTS = "on the test set", "at the clients"


def score_of(runs: Iterable[Run]) -> str | None:
    """Return what runs are scored by: accuracy, loss where none classifies, None without both."""
    known = list(runs)
    return next((name for name in _MEASURED if any(run.points(name) for run in known)), None)


def evaluation_place(runs: Iterable[Run], score: str = "accuracy") -> str:
    """Return where the scores of runs were measured: ON_TEST_SET, AT_CLIENTS, or both."""
    places = {AT_CLIENTS if run.at_clients else ON_TEST_SET for run in runs if run.points(score)}
    return " or ".join(sorted(places, reverse=True))


def find_runs(folder: Path, seen: set[Path] | None = None) -> Iterator[Path]:
    """Yield the results directories in a folder, or the folder itself if it is one."""
    seen = set() if seen is None else seen
    if any((folder / name).is_file() for name in (CONFIG, METRICS, SUMMARY)):
        yield folder
        return
    found = [
        run
        for child in sorted(subfolders(folder, seen), key=_job_number)
        if child.name not in NOT_SEARCHED
        for run in find_runs(child, seen)
    ]
    yield from found
    # A run that fails before it writes results leaves only a log. A sweep has one as well.
    if not found and (folder / LOG).is_file() and not (folder / "sweep.json").is_file():
        yield folder


def _job_number(path: Path) -> tuple[int, str]:
    """Sort the cells of fedhet-tune, and Hydra's own job folders, by number: 10_... after 9_..."""
    number = path.name.partition("_")[0]
    return (int(number) if number.isdigit() else -1, path.name)


def read_run(folder: Path, name: str, source: int, *, resumed: bool = False) -> Run:
    """Read one results directory, complete or not; a ``resumed`` run's summary.json is outdated."""
    summary, summary_error = dict[str, Any](), ""
    if not resumed:
        summary, summary_error = _read(SUMMARY, lambda: read_summary(folder), summary)
    recipe, recipe_error = _read(CONFIG, lambda: _recipe(folder, summary), OmegaConf.create({}))
    rows, rows_error = _read(METRICS, lambda: _rows(folder / METRICS, summary), list[Row]())
    status = str(summary.get("status", UNFINISHED))
    rows_error = rows_error or _missing_rows(rows, summary)
    if status == COMPLETED and (recipe_error or rows_error):
        status = UNFINISHED
    problems = [str(summary.get("error", "")), recipe_error, rows_error, summary_error]
    plain = cast(dict[str, Any], OmegaConf.to_container(recipe, resolve=False))
    paper = plain.pop("paper", None)
    settings = flat(plain)
    if settings.get("clients") == 0:  # whoever registered
        settings["clients"] = summary.get("clients", 0)
    if summary.get("partition") == BY_CLIENT:  # nothing is divided
        read = {"partition.holdout", "partition.unseen"}
        unread = {key for key in settings if key.startswith("partition.")} - read
        settings = {key: value for key, value in settings.items() if key not in unread}
    known = bool(OmegaConf.select(recipe, "strategy.methods"))
    return Run(
        name=name,
        source=source,
        method=str(summary.get("strategy") or (method_name(recipe) if known else "unknown")),
        seed=settings.get("seed", summary.get("seed")),
        status=status if status in (COMPLETED, DIVERGED, STOPPED, FAILED) else UNFINISHED,
        error="; ".join(problem for problem in problems if problem),
        settings=settings,
        columns=columns_of(rows),
        summary={key: value for key, value in summary.items() if key not in ("status", "error")},
        refusals=_refusals(rows),
        distrusted=_distrusted(rows),
        paper=paper,
        layers=read_layers(folder, LATE_ROUNDS) if status == COMPLETED else LayerFigures(),
        sites=read_site_figures(folder, rows, summary) if status == COMPLETED else None,
        folder=folder,
    )


def _read(name: str, read: Callable[[], Found], empty: Found) -> tuple[Found, str]:
    """Return what a file holds, and what is wrong with the file."""
    try:
        return read(), ""
    except FileNotFoundError:
        running = ": the run has not ended, or was killed" if name == SUMMARY else ""
        return empty, f"it has no {name}{running}"
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        return empty, f"its {name} cannot be read: {reason}"


def _recipe(folder: Path, summary: Mapping[str, Any]) -> DictConfig:
    recipe = OmegaConf.create(read_config(folder, summary))
    if not isinstance(recipe, DictConfig):
        raise ValueError("it is not a mapping")
    return recipe


def _rows(path: Path, summary: Mapping[str, Any]) -> list[Row]:
    rows = read_rows(path)
    if not rows:
        raise ValueError("it has no complete line")
    if not _missing_rows(rows, summary):
        check_rows(path, rows, summary)
    return rows


def _missing_rows(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """Compare metrics.jsonl and summary.json: one of them may be a copy that was cut short."""
    found, expected = sum(row["round"] > 0 for row in rows), summary.get("rounds")
    message = f"its metrics.jsonl has {found} rounds, and its summary.json says {expected}"
    return "" if expected in (None, found) else message


def _refusals(rows: Sequence[Row]) -> list[str]:
    found = [f"round {row['round']}: {text}" for row in rows for text in row.get("failures", [])]
    return found[:MOST_REFUSALS]


def _distrusted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    found = {}
    for name in DISTRUST:
        counts = Counter(str(client) for row in rows for client in row.get(name) or ())
        if counts:
            found[name] = dict(sorted(counts.items(), key=lambda one: (-one[1], int(one[0]))))
    return found


_COUNTS = {"alarms"}  # a row without it has none


def columns_of(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return the numeric columns of metrics.jsonl; None where a row has no finite value."""
    counted = [
        {**row, "clients": len(row["clients"])} if isinstance(row.get("clients"), list) else row
        for row in rows
    ]
    names = dict.fromkeys(name for row in counted for name, value in row.items() if _numeric(value))
    for name in _COUNTS & names.keys():
        counted = [{name: 0, **row} if row.get("round", 0) > 0 else row for row in counted]
    scores = rows[0].keys() if rows and rows[0]["round"] == 0 else set(_MEASURED)  # exact
    return {
        name: [_stored(row.get(name), exact=name in scores) for row in counted] for name in names
    }


def _numeric(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stored(value: Any, *, exact: bool) -> float | None:
    """Keep six digits of what no interval is made of: the data file shrinks to a fifth."""
    if not _numeric(value) or not math.isfinite(value):
        return None
    if isinstance(value, int) or float(value).is_integer():
        return int(value)
    return float(value) if exact else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
