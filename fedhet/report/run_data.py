"""What runs have left in their results directories, as small values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.results import Row, read_rows
from conf import method_name
from reproductions.feddw.classifier_data import (
    HeadNorms,
    Relations,
    read_head_norms,
    read_relations,
)
from reproductions.fedpvr.layer_data import LayerFigures, read_layers
from reproductions.maecho.decoder_data import Generated, read_generated
from reproductions.maecho.fusion_path import FusionPath, Neurons

COMPLETED, FAILED, UNFINISHED = "completed", "failed", "unfinished"
MARKS = ("config.yaml", "metrics.jsonl", "summary.json")  # of a run's results directory
NOT_SEARCHED = ("checkpoints", "client_state", "report", "replaced")
MOST_REFUSALS = 5
SIGNIFICANT_DIGITS = 6
LATE_ROUNDS = 10  # the last ones, over which diagnostics are averaged

Column = Sequence[float | None]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        name: its folder, as the page names it.
        source: which of the report's sources it is from.
        method: the method's name.
        seed: of the run; None where it is not known.
        status: completed, failed or unfinished.
        error: why it is not completed, or what about its files is wrong.
        settings: config.yaml with dotted keys.
        columns: of metrics.jsonl, by name; all as long as ``columns["round"]``. ``clients`` is how
            many were aggregated.
        summary: of summary.json, what the page shows.
        refusals: the first refused replies.
        paper: the ``paper`` node of its recipe.
        relations: how its classes relate, where it keeps soft labels.
        head_norms: of the clients' own heads, where they have such.
        generated: what its decoders generate, where it has such.
        fusion: how its fusion went on, where it was fused again.
        neurons: of its clients in that fusion.
        layers: its figures by layer, where it has written such.
        folder: where it lies; None for a run out of a data file.
    """

    name: str
    source: int
    method: str
    seed: int | None
    status: str
    error: str = ""
    settings: Settings = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    refusals: Sequence[str] = ()
    paper: Mapping[str, Any] | None = None
    relations: Relations | None = None
    head_norms: HeadNorms | None = None
    generated: Generated | None = None
    fusion: FusionPath | None = None
    neurons: Neurons | None = None
    layers: LayerFigures | None = None
    folder: Path | None = field(default=None, compare=False)

    def points(self, column: str) -> list[tuple[int, float]]:
        """Return (round, value) where the column has a value."""
        rounds = self.columns.get("round", ())
        values = self.columns.get(column, [None] * len(rounds))
        pairs = zip(rounds, values, strict=True)
        return [(int(r), float(v)) for r, v in pairs if r is not None and v is not None]

    def bytes_until(self, last: int) -> float:
        """Return the bytes up and down of the rounds until ``last``, all clients together."""
        both = self.points("bytes_up") + self.points("bytes_down")
        return sum(value for round, value in both if 0 < round <= last)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the results directories in a folder, or the folder itself if it is one."""
    if any((folder / mark).is_file() for mark in MARKS):
        yield folder
        return
    found = False
    for child in sorted(folder.iterdir(), key=_natural):
        if child.is_dir() and child.name not in NOT_SEARCHED and not child.name.startswith("."):
            for run in find_runs(child):
                found = True
                yield run
    # A run that failed before it wrote anything has left its log; a sweep has one, too.
    if not found and (folder / "log.txt").is_file() and not (folder / "sweep.json").is_file():
        yield folder


def _natural(path: Path) -> tuple[int, str]:
    """Sort Hydra's job folders by their number: 10_... after 9_..."""
    number = path.name.partition("_")[0]
    return (int(number) if number.isdigit() else -1, path.name)


def read_run(folder: Path, name: str, source: int) -> Run:
    """Read one results directory, whatever state it is in."""
    recipe, recipe_error = _read_recipe(folder / "config.yaml")
    rows, rows_error = _read_metrics(folder / "metrics.jsonl")
    summary, summary_error = _read_summary(folder / "summary.json")
    status = str(summary.get("status", UNFINISHED))
    rows_error = rows_error or _missing_rows(rows, summary)
    problems = [str(summary.get("error", "")), recipe_error, rows_error, summary_error]
    if status == COMPLETED and (recipe_error or rows_error):
        status = UNFINISHED  # it may be complete, but it cannot be read
    plain = OmegaConf.to_container(recipe, resolve=False)
    assert isinstance(plain, dict)
    paper = plain.pop("paper", None)
    settings = flat(plain)
    known = bool(OmegaConf.select(recipe, "strategy.methods"))
    done = status == COMPLETED
    return Run(
        name=name,
        source=source,
        method=str(summary.get("strategy") or (method_name(recipe) if known else "unknown")),
        seed=settings.get("seed", summary.get("seed")),
        status=status if status in (COMPLETED, FAILED) else UNFINISHED,
        error="; ".join(problem for problem in problems if problem),
        settings=settings,
        columns=columns_of(rows),
        summary={key: value for key, value in summary.items() if key not in ("status", "error")},
        refusals=[text for row in rows for text in _refusals(row)][:MOST_REFUSALS],
        paper=paper,
        relations=read_relations(folder) if done else None,
        head_norms=read_head_norms(folder) if done else None,
        generated=read_generated(folder, settings) if done else None,
        layers=read_layers(folder, LATE_ROUNDS) if done else None,
        folder=folder,
    )


def _read_recipe(path: Path) -> tuple[DictConfig, str]:
    try:
        recipe = OmegaConf.load(path)
    except FileNotFoundError:
        return OmegaConf.create({}), "it has no config.yaml"
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        return OmegaConf.create({}), f"its config.yaml cannot be read: {_first_line(error)}"
    if not isinstance(recipe, DictConfig):
        return OmegaConf.create({}), "its config.yaml is no mapping"
    return recipe, ""


def _read_metrics(path: Path) -> tuple[list[Row], str]:
    try:
        rows = read_rows(path)
    except FileNotFoundError:
        return [], "it has no metrics.jsonl"
    except ValueError as error:
        return [], f"its metrics.jsonl cannot be read: {_first_line(error)}"
    if not all(isinstance(row, dict) and isinstance(row.get("round"), int) for row in rows):
        return [], "its metrics.jsonl has lines without a round"
    return rows, "" if rows else "its metrics.jsonl has no whole line"


def _missing_rows(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """Compare the two files: a copy that was cut short must not pass for a run's end."""
    found, said = sum(row["round"] > 0 for row in rows), summary.get("rounds")
    if said is None or found == said:
        return ""
    return f"its metrics.jsonl has {found} rounds, and its summary.json says {said}"


def _read_summary(path: Path) -> tuple[dict[str, Any], str]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "it has no summary.json: it is still running, or was killed"
    except ValueError as error:
        return {}, f"its summary.json cannot be read: {_first_line(error)}"
    return (summary, "") if isinstance(summary, dict) else ({}, "its summary.json is no mapping")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _refusals(row: Row) -> list[str]:
    return [f"round {row['round']}: {text}" for text in row.get("failures", [])]


def flat(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as one with dotted keys; empty mappings say nothing."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def columns_of(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return the numeric columns of metrics.jsonl; None where a row has no finite value.

    Of the ids in ``clients`` their number is kept.
    """
    counted = [_counted(row) for row in rows]
    names = dict.fromkeys(name for row in counted for name, value in row.items() if _numeric(value))
    return {name: [_rounded(row.get(name)) for row in counted] for name in names}


def _counted(row: Row) -> Row:
    clients = row.get("clients")
    return {**row, "clients": len(clients)} if isinstance(clients, list) else row


def _numeric(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: Any) -> float | None:
    """Keep six digits: more than any table shows, and a fifth of the file."""
    if not _numeric(value) or not math.isfinite(value):
        return None
    if isinstance(value, int) or float(value).is_integer():
        return int(value)
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
