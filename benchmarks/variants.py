"""The comparison's chosen global methods once more, with one thing of its recipes changed.

    FEDHET_DATA=/data python -m benchmarks variants last_batches
    FEDHET_DATA=/data python -m benchmarks variants held_classes

``last_batches``: a step on a single example is as long as one on 32 and can undo what the others
have learned (docs/results/niid_bench.md, "Why single rounds fall"). Runs the six tasks in which a
client may have such a step with the last batch and with ``local.drop_last=true``.

``held_classes``: where ten clients have two random classes each, one or more of the ten classes are
with nobody in 17 of 20 pairs of a task and a seed, and no method can learn them. Runs these four
tasks with ``partition.class_assignment_mode=first-deterministic``, by which every class is with a
client; beside them are the comparison's own runs.

Fixed before the first run of each: the comparison's ranking stands if FedDyn, FedCM, FedMRUR,
MoFedSAM, FedSpeed, SCAFFOLD and FedPVR are above FedAvg in the mean over the variant's tasks with
the change, too, and Spearman's correlation of the methods' mean differences to FedAvg, with it and
without, is at least .9.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

from benchmarks.comparison import (
    COMMON,
    GLOBAL,
    OF_GROUP,
    PART,
    SEEDS,
    TASKS,
    final_runs,
    ready,
)
from benchmarks.harness import FOLDER, save
from fedhet.common.files import save_text
from fedhet.runs import partition

NOT_STORED = {"group", "bytes_up", "bytes_down", "cpu_seconds"}  # the comparison has them


@dataclass(frozen=True)
class Variant:
    """What is changed.

    Attributes:
        tasks: the comparison's tasks that it is about.
        key: the name of what is changed.
        settings: the recipe's words for each of its two values; None: the comparison's own runs.
    """

    tasks: tuple[str, ...]
    key: str
    settings: dict[str, tuple[str, ...] | None]


VARIANTS = {
    "last_batches": Variant(
        ("digits", "mnist_dirichlet", "mnist_many", "imdb", "synthetic", "synthetic_00"),
        "last_batch",
        {"kept": (), "dropped": ("local.drop_last=true",)},
    ),
    "held_classes": Variant(
        ("mnist", "mnist_cnn", "digits_two_classes", "cifar10_two_classes"),
        "classes",
        {"random": None, "held": ("partition.class_assignment_mode=first-deterministic",)},
    ),
}
Cell = tuple[Variant, str, str, list[str]]


def run(cell: Cell) -> list[dict[str, Any]]:
    """Return a method's new runs on a task, with each setting."""
    variant, task, method, choice = cell
    found = []
    for setting, words in variant.settings.items():
        if words is not None:
            with tempfile.TemporaryDirectory() as scratch:
                runs = final_runs(Path(scratch), task, "global", method, [*choice, *words])
            found += [{variant.key: setting, **stored(one)} for one in runs]
    return found


def stored(run: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a run."""
    return {key: value for key, value in run.items() if key not in NOT_STORED}


def absent(tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the classes that no client has, of each task and seed of the comparison."""
    found = []
    for task, seed in itertools.product(tasks, SEEDS):
        words = (*COMMON, *TASKS[task], *OF_GROUP["global"], f"{PART}final", f"seed={seed}")
        held = partition(*words).sum()
        names = [str(name) for name in held.index[held == 0]]
        found.append({"task": task, "seed": seed, "absent": names, "any": int(bool(names))})
    return found


def differences(runs: list[dict[str, Any]], variant: Variant) -> dict[str, Any]:
    """Return each method's mean difference to FedAvg, in points, and Spearman's correlation."""
    keys = [variant.key, "method", "task", "seed"]
    accuracy = 100 * pd.DataFrame(runs).set_index(keys)["accuracy"].unstack("method")
    gaps = accuracy.sub(accuracy["fedavg"], axis="index").groupby(variant.key).mean()
    others = gaps.drop(columns="fedavg")
    alike = spearmanr(*(others.loc[setting] for setting in variant.settings)).statistic
    return {
        "tests": [{"methods": len(others.columns), "spearman": round(float(alike), 3)}],
        "methods": [
            {"method": name, **{key: round(float(gap), 3) for key, gap in column.items()}}
            for name, column in others.items()
        ],
    }


def main() -> None:
    """Run, and write what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=VARIANTS)
    parser.add_argument("--out", type=Path, help="a JSON file, else benchmarks/NAME.json")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    variant, out = VARIANTS[options.name], options.out or FOLDER / f"{options.name}.json"
    comparison = json.loads((FOLDER / "comparison.json").read_text())
    chosen = {
        (one["task"], one["group"], one["method"]): one["words"] for one in comparison["chosen"]
    }
    cells: list[Cell] = [
        (variant, task, method, chosen[task, "global", method])
        for task in variant.tasks
        for method in GLOBAL
    ]
    runs = [
        {variant.key: setting, **stored(one)}
        for setting, words in variant.settings.items()
        for one in comparison["runs"]
        if words is None and one["task"] in variant.tasks and one["group"] == "global"
    ]
    with multiprocessing.get_context("fork").Pool(options.processes, ready) as pool:
        for number, found in enumerate(pool.imap(run, cells), 1):
            runs += found
            save_text(out, json.dumps({"runs": runs}) + "\n")  # in case it is stopped
            print(
                f"{number} of {len(cells)}: {found[0]['method']} on {found[0]['task']}", flush=True
            )
    save(out, {**differences(runs, variant), "partitions": absent(variant.tasks), "runs": runs})


if __name__ == "__main__":
    main()
