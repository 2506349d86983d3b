"""What robust aggregators are worth: accuracy under attack, lies in payloads, and what they cost.

    FEDHET_DATA=... nice python -m benchmarks robust TABLE [--seeds 3]

``digits`` and ``mnist`` are tables attacks x aggregators, ``payloads`` is methods x aggregators
under lies in what they send beside the update. A cell is the accuracy after the last round, and for
the backdoor also its success, of one run a seed; a run whose model is no longer finite has none.
All cells are run with seed 0, then with seed 1 and so on. Runs that the file has are not run again,
so a table that was stopped goes on where it was.
``alarms`` counts which clients the alarm names. ``costs`` measures one aggregation of 100 updates
of 11 million parameters beside the plain mean.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import FOLDER, options_of, save
from fedhet import launch
from fedhet.common.results import COMPLETED, DIVERGED, METRICS, SUMMARY, read_rows

Words = tuple[str, ...]


@dataclass(frozen=True)
class TableOfRuns:
    """The words of a table's runs; every row is run with every column.

    Attributes:
        common: of all runs.
        columns: by name, of attacks or of methods under a lie.
        rows: by name, of aggregators.
        refused: cells (column, row) that the command refuses.
    """

    common: Words
    columns: Mapping[str, Words]
    rows: Mapping[str, Words]
    refused: frozenset[tuple[str, str]] = frozenset()


def _attack(name: str, *words: str) -> Words:
    return (f"attack={name}", "attack.allow=true", *words)


def _attacks(alie: float | None) -> dict[str, Words]:
    z = () if alie is None else (f"attack.z={alie}",)
    names = ("label_flip", "sign_flip", "scaled_update", "gaussian", "inner_product", "backdoor")
    plain = {name: _attack(name) for name in names}
    return {"none": (), **plain, "alie": _attack("alie", *z)}


def _aggregators(attackers: int, bulyan: int) -> dict[str, Words]:
    words = {
        "weighted_mean": (),
        "median": (),
        "trimmed_mean": (),
        "krum": (f"strategy.aggregator.attackers={attackers}",),
        "multi_krum": (f"strategy.aggregator.attackers={attackers}",),
        "bulyan": (f"strategy.aggregator.attackers={bulyan}",),
        "geometric_median": (),
        "centered_clipping": (),
        "norm_bound": (),
        "fltrust": (),
    }
    return {name: (f"strategy/aggregator={name}", *keys) for name, keys in words.items()}


_SHORT = ("runtime=local", "device=cpu", "evaluation.received=false", "checkpoint.every=0")
_DIGITS = (*_SHORT, "task=digits", "partition=dirichlet", "partition.alpha=0.3")
_DIGITS += ("clients=10", "participation=1.0", "rounds=15")
_LIES = {
    "FedPVR": ("strategy=fedpvr", *_attack("control_variate_lie")),
    "SCAFFOLD": ("strategy=scaffold", *_attack("control_variate_lie")),
    "FedDW": ("strategy=feddw", *_attack("soft_label_lie")),
    "FedMRUR": ("strategy=fedmrur", *_attack("scaled_update")),
    "MA-Echo": ("strategy=maecho", "rounds=1", *_attack("projection_lie")),
}
_HONEST = {name: tuple(w for w in words if "attack" not in w) for name, words in _LIES.items()}
_ROBUST = ("median", "multi_krum", "geometric_median", "centered_clipping")
_FIRST = ("weighted_mean", "its own", *_ROBUST)  # rows that are run before the others

TABLES = {
    "digits": TableOfRuns(_DIGITS, _attacks(1.5), _aggregators(2, 1)),
    "mnist": TableOfRuns(
        (
            *(*_SHORT, "task=mnist", "task.model=mlp", "task.train_size=12000"),
            *("partition=dirichlet", "partition.alpha=0.3", "clients=20", "participation=1.0"),
            *("local.epochs=1", "rounds=20", "evaluation.every=5"),
        ),
        _attacks(None),
        _aggregators(4, 4),
    ),
    "payloads": TableOfRuns(
        _DIGITS,
        {key: w for n in _LIES for key, w in ((f"{n}, honest", _HONEST[n]), (n, _LIES[n]))},
        {"its own": ()} | {name: _aggregators(2, 1)[name] for name in _ROBUST},
        frozenset((name, row) for name in ("MA-Echo", "MA-Echo, honest") for row in _ROBUST),
    ),
}


def cells(table: TableOfRuns) -> Iterator[tuple[str, str, Words]]:
    """Yield column, row and words, the rows of a column together."""
    for column, words in table.columns.items():
        for row, keys in table.rows.items():
            if (column, row) not in table.refused:
                yield column, row, (*table.common, *words, *keys)


def run_cell(words: Words, seed: int) -> dict[str, Any]:
    """Run a cell's recipe with a seed; return what the run ended with.

    The command runs in this process, which has everything imported: that takes longer than a run.
    """
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(io.StringIO()):
        folder = Path(scratch) / "run"
        sys.argv[:] = ["fedhet", *words, f"seed={seed}", f"results_dir={folder}"]
        try:
            launch.main()
        except SystemExit as end:  # after the run, or instead of one
            if not (folder / SUMMARY).exists():
                raise SystemExit(f"{' '.join(sys.argv)}: {end}") from None
        found = _ended(folder)
    if found["status"] not in (COMPLETED, DIVERGED):
        raise SystemExit(f"{' '.join(sys.argv)}: {found['status']}")
    return found


def _ended(folder: Path) -> dict[str, Any]:
    """Return status, accuracy, the backdoor's success and alarms of a run."""
    summary = json.loads((folder / SUMMARY).read_text())
    rows = read_rows(folder / METRICS)
    accuracy, loss = summary.get("accuracy"), summary.get("loss")
    finite = summary["status"] == "completed" and loss is not None and math.isfinite(loss)
    return {
        "seed": summary["seed"],
        "status": summary["status"],
        "accuracy": accuracy if finite else None,
        "attack_success": rows[-1].get("attack_success"),
        "alarms": sum(row.get("alarms") or 0 for row in rows),
    }


def run_table(name: str, seeds: int, path: Path) -> None:
    """Run what ``path`` does not have yet of a table's cells; it is written after each run."""
    found = json.loads(path.read_text())["cells"] if path.exists() else {}
    ordered = sorted(cells(TABLES[name]), key=lambda cell: cell[1] not in _FIRST)
    wanted = [(seed, *cell) for seed in range(seeds) for cell in ordered]
    for number, (seed, column, row, words) in enumerate(wanted, 1):
        cell = found.setdefault(f"{column} | {row}", {"words": list(words)})
        if seed not in cell.get("seed", ()):
            for key, value in run_cell(words, seed).items():
                cell.setdefault(key, []).append(value)
            save(path, {"table": name, "cells": found})
        print(f"{number}/{len(wanted)} {column} | {row}: {cell['accuracy']}", flush=True)


def markdown(path: Path) -> str:
    """Return a stored table: mean and sample deviation over the seeds in %, the backdoor's success.

    The seeds are those that all cells have, so that a table that was stopped compares equals. A
    cell of which a run did not stay finite says of how many; one that is refused has a dash.
    """
    stored = json.loads(path.read_text())
    found, table = _complete(stored["cells"]), TABLES[stored["table"]]
    lines = [
        f"| aggregator | {' | '.join(table.columns)} |",
        "|---" * (len(table.columns) + 1) + "|",
    ]
    for row in table.rows:
        texts = [_cell(found.get(f"{column} | {row}")) for column in table.columns]
        lines.append(f"| `{row}` | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _complete(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the cells with the runs of those seeds alone that every cell has."""
    seeds = set.intersection(*(set(cell["seed"]) for cell in found.values()))
    return {name: _of_seeds(cell, seeds) for name, cell in found.items()}


def _of_seeds(cell: dict[str, Any], seeds: set[int]) -> dict[str, Any]:
    kept = [place for place, seed in enumerate(cell["seed"]) if seed in seeds]
    figures = ("seed", "status", "accuracy", "attack_success", "alarms")
    return {**cell, **{name: [cell[name][place] for place in kept] for name in figures}}


def damage(path: Path) -> str:
    """Return what each lie of the stored ``payloads`` costs its method, and which rule costs least.

    Of the rules, the one with the highest mean under the lie is named.
    """
    found = json.loads(path.read_text())["cells"]
    lines = [
        "| method | lie | honest | with the lie | costs | the best of the rules |",
        "|---" * 6 + "|",
    ]
    for name, words in _LIES.items():
        lie = next(word.partition("=")[2] for word in words if word.startswith("attack="))
        honest, lied = (found[f"{column} | its own"] for column in (f"{name}, honest", name))
        rules = {r: found[f"{name} | {r}"] for r in _ROBUST if f"{name} | {r}" in found}
        best = max(rules, key=lambda rule: _mean(rules[rule]), default="")
        defended = f"`{best}`: {_cell(rules[best])}" if best else "none: all are refused"
        costs = f"{_mean(honest) - _mean(lied):.1f}" if None not in lied["accuracy"] else "all"
        row = (name, f"`{lie}`", _cell(honest), _cell(lied), costs, defended)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _mean(cell: dict[str, Any]) -> float:
    """Return the mean accuracy in %; a run that diverged has none, and counts as 0."""
    return 100 * statistics.fmean(value or 0.0 for value in cell["accuracy"])


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    finite = [100 * value for value in cell["accuracy"] if value is not None]
    if len(finite) < len(cell["accuracy"]):
        return f"{len(cell['accuracy']) - len(finite)} of {len(cell['accuracy'])} diverged"
    spread = f" ± {statistics.stdev(finite):.1f}" if len(finite) > 1 else ""
    text = f"{statistics.fmean(finite):.1f}{spread}"
    success = [100 * value for value in cell["attack_success"] if value is not None]
    return f"{text} ({statistics.fmean(success):.0f})" if success else text


def main() -> None:
    """Run one table, or measure the costs."""
    parser = options_of(__doc__, "robust", 3)
    parser.add_argument("table", choices=(*TABLES, "alarms", "costs"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    default = FOLDER / "robust.json"
    path = FOLDER / f"robust_{options.table}.json" if options.out == default else options.out
    if options.table == "costs":
        from benchmarks.robust_costs import measure

        save(path, measure(options.repeats))
    elif options.table == "alarms":
        from benchmarks import robust_alarms

        robust_alarms.measure(path, options.seeds)
    else:
        run_table(options.table, options.seeds, path)
