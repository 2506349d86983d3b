"""The methods beside each other: tuned alike, on tasks that need no download, in ranks.

    FEDHET_DATA=/data python -m benchmarks comparison            # every task; goes on where it was

Global methods are compared by the accuracy of the global model on a pooled test set, personalised
ones by the mean accuracy of the clients' own models on what each client holds out. Of FedAvg and of
methods without a model of their own the latter is the global model after the client has trained.

The rules, fixed before the first run that counts:

1. Every method has four trials a task on the part ``tune`` of the data, with the seed 100: two step
   sizes and two values of its main key; or four step sizes, if it has none. Everything else is the
   method's default. The part ``final`` has none of these examples.
2. A run's number, in tuning and after, is the mean accuracy of its last five evaluations (rounds 8
   to 12). A run that diverges has the number of chance, one over the classes. (So had one that
   failed, until 2026-11-29: FedAMP's 18 with a CNN, by a defect of ours, were then run again.)
3. The trial with the best number is chosen, of equal ones the first: the smaller step size. It is
   run with the seeds 0 to 4 (partition, first model, cohorts, batches) on the part ``final``.
4. A method's number on a task is the mean of the five. Methods are ranked on each task; equal ones
   share the mean of their ranks. A task counts if all methods have run on it.
5. Average ranks are compared by Friedman's test and Nemenyi's critical difference at .05 (Demsar
   2006). Beside them: how often the interval of the paired differences to FedAvg (Student, five
   seeds) excludes zero. No method leaves the race early, and no value changes after the first run.
6. The tasks of ``comparison_page.FIRST`` were measured on 2026-11-28. The other 14 were chosen on
   2026-11-29, when those were known and before a run of their own, MNIST with two classes a client
   the day before. So they are a test of the first ranking: ranks and Friedman's test are also given
   of them alone, with Spearman's correlation of the two rankings. (Two could not be drawn as they
   were written, and got fewer clients, or smaller ones, when FedAvg alone had run: breast_cancer,
   imdb_many.)
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison_page import draw, summarised, tables, tasks_table
from benchmarks.harness import options_of, save
from fedhet.common.errors import DivergedError
from fedhet.common.files import save_text
from fedhet.common.flower.task_identity import set_identity
from fedhet.common.results import METRICS, read_rows
from tests.recipes import run_recipe

TWO, FOUR = (0.1, 0.3), (0.05, 0.1, 0.2, 0.4)  # local.lr
TUNED_ON, SEEDS, LAST = 100, (0, 1, 2, 3, 4), 5
PART = "+task.data_options.part="
Key = tuple[str, Sequence[float]] | None  # a method's main key and two values
GLOBAL: dict[str, Key] = {
    "fedavg": None,
    "fedprox": ("strategy.fedprox.mu", (0.01, 0.1)),
    "scaffold": None,
    "fedpvr": None,
    "fednova": None,
    "feddyn": ("strategy.feddyn.alpha", (0.01, 0.1)),
    "fedavgm": ("strategy.fedavgm.momentum", (0.5, 0.9)),
    "fedadam": ("server.lr", (0.01, 0.1)),
    "fedexp": None,
    "fedcm": ("strategy.client_momentum.alpha", (0.1, 0.5)),
    "fedsam": ("strategy.sam.rho", (0.01, 0.1)),
    "mofedsam": ("strategy.client_momentum.alpha", (0.1, 0.5)),
    "fedmrur": ("strategy.client_momentum.alpha", (0.1, 0.5)),
    "fedlesam": ("strategy.fedlesam.rho", (0.01, 0.1)),
    "fedspeed": ("strategy.fedspeed.mu", (0.01, 0.1)),
    "moon": ("strategy.moon.mu", (1.0, 5.0)),
    "feddw": ("strategy.feddw.mu", (0.1, 10.0)),
    "logit_adjustment": ("strategy.logit_adjustment.tau", (0.5, 1.0)),
    "fedntd": ("strategy.fedntd.beta", (0.3, 1.0)),
    "feddistill": ("strategy.feddistill.coefficient", (0.1, 1.0)),
}
PERSONAL: dict[str, Key] = {
    "fedavg": None,
    "local": None,
    "fedper": None,
    "fedrep": None,
    "lg_fedavg": None,
    "fedrod": None,
    "fedala": ("strategy.fedala.eta", (0.1, 1.0)),
    "ditto": ("strategy.ditto.coefficient", (0.1, 1.0)),
    "apfl": ("strategy.apfl.alpha", (0.25, 0.75)),
    "per_fedavg": ("strategy.per_fedavg.alpha", (0.01, 0.1)),
    "dbe": ("strategy.dbe.kappa", (1.0, 10.0)),
    "fedamp": ("strategy.fedamp.coefficient", (0.1, 1.0)),
}
GROUPS = {"global": GLOBAL, "personal": PERSONAL}
COMMON = (
    *("task=own", "task.model=fedhet.tasks.tabular:mlp", "task.model_options.hidden=[64]"),
    *("rounds=12", "local.epochs=2", "local.batch_size=32", "evaluation.every=1", "logger=none"),
    *("evaluation.received=false", "checkpoint.every=0", "device=cpu"),
)
OF_GROUP = {
    "global": ("+task.data_options.pooled_test=true",),
    "personal": (
        *("+task.data_options.pooled_test=false", "partition.holdout=0.4"),
        "evaluation.model=clients",
    ),
}


def _data(
    name: str, inputs: int | tuple[int, ...], classes: int, **options: Any
) -> tuple[str, ...]:
    options = {"name": name, **options} | ({} if isinstance(inputs, int) else {"flat": "false"})
    given = ",".join(f"{key}:{value}" for key, value in options.items())
    shape = [inputs] if isinstance(inputs, int) else list(inputs)
    return (
        "task.data=benchmarks.comparison_data:load",
        f"task.data_options={{{given}}}",
        f"task.input_shape={shape}",
        f"task.num_classes={classes}",
    )


def _synthetic(spread: float) -> tuple[str, ...]:
    return (
        "task.data=benchmarks.comparison_data:synthetic",
        "task.test_data=benchmarks.comparison_data:synthetic_test",
        f"task.data_options={{alpha:{spread},beta:{spread}}}",
        "task.input_shape=[60]",
        "task.num_classes=10",
    )


def _dirichlet(alpha: float) -> tuple[str, ...]:
    return ("partition=dirichlet", f"partition.alpha={alpha}")


TEN = ("clients=10", "participation=0.5")
MANY = ("clients=30", "participation=0.1", "partition.min_size=4")
CNN = ("task.model=gn_cnn", "task.model_options=null")
TWO_CLASSES = ("partition=pathological", "partition.classes=2")
CAMERAS = ("clients=5", "partition=natural")
TASKS = {  # the words of each
    "digits": (*_data("digits", 64, 10), *TEN, *_dirichlet(0.1)),
    "heart_disease": (*_data("heart_disease", 13, 2), "clients=4", "partition=natural"),
    "synthetic": (*_synthetic(1.0), *TEN),
    "mnist_cameras": (*_data("mnist", 196, 10, cameras="true"), *CAMERAS),
    "cifar10": (*_data("cifar10", 192, 10), *TEN, *_dirichlet(0.3)),
    "imdb": (*_data("imdb", 1024, 2), *TEN, *_dirichlet(0.3)),
    "mnist": (*_data("mnist", 196, 10), *TEN, *TWO_CLASSES),
    "mnist_dirichlet": (*_data("mnist", 196, 10), *TEN, *_dirichlet(0.1)),
    "mnist_many": (*_data("mnist", 196, 10), *_dirichlet(0.3), *MANY),
    "mnist_iid": (*_data("mnist", 196, 10), *TEN, "partition=iid"),
    "mnist_cnn": (*_data("mnist", (1, 14, 14), 10), *CNN, *TEN, *TWO_CLASSES),
    "mnist_cnn_cameras": (*_data("mnist", (1, 14, 14), 10, cameras="true"), *CNN, *CAMERAS),
    "digits_two_classes": (*_data("digits", 64, 10), *TEN, *TWO_CLASSES),
    "digits_cameras": (*_data("digits", 64, 10, cameras="true"), *CAMERAS),
    "cifar10_two_classes": (*_data("cifar10", 192, 10), *TEN, *TWO_CLASSES),
    "cifar10_cameras": (*_data("cifar10", 192, 10, cameras="true"), *CAMERAS),
    "cifar10_cnn": (*_data("cifar10", (3, 8, 8), 10), *CNN, *TEN, *_dirichlet(0.3)),
    "imdb_many": (*_data("imdb", 1024, 2), *_dirichlet(0.3), *MANY, "partition.min_size=2"),
    "breast_cancer": (*_data("breast_cancer", 30, 2), "clients=5", *_dirichlet(0.3)),
    "synthetic_00": (*_synthetic(0.0), *TEN),
}
CHANCE = {name: 0.5 if "task.num_classes=2" in words else 0.1 for name, words in TASKS.items()}


def trials(key: Key) -> list[tuple[str, ...]]:
    """Return the words of a method's four trials."""
    if key is None:
        return [(f"local.lr={lr}",) for lr in FOUR]
    return [(f"local.lr={lr}", f"{key[0]}={value}") for lr, value in itertools.product(TWO, key[1])]


def measure(folder: Path, task: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a recipe in this process; return its number and its costs."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            named = f"task.name=compared_{task}"
            summary = run_recipe(folder, *COMMON, *TASKS[task], named, *words, clients=30)
    except DivergedError as error:  # as the rules say: chance; another error is a defect
        return {"accuracy": CHANCE[task], "failed": f"{type(error).__name__}: {error}"[:200]}
    rows = [row for row in read_rows(folder / METRICS) if row["round"] > 0]
    late = [row["accuracy"] for row in rows if row.get("accuracy") is not None][-LAST:]
    costs = {name: summary[name] for name in ("bytes_up", "bytes_down")}
    costs["cpu_seconds"] = round(time.process_time() - began, 2)
    return {"accuracy": round(statistics.fmean(late), 5), **costs}


def final_runs(
    out: Path, task: str, group: str, method: str, words: Sequence[str]
) -> list[dict[str, Any]]:
    """Run a method with what was chosen, and return each seed's number and costs."""
    own = (f"strategy={method}", *OF_GROUP[group], f"{PART}final", *words)
    of_cell = {"task": task, "group": group, "method": method}
    return [
        {**of_cell, "seed": seed}
        | measure(out / group / f"{task}-{method}-seed{seed}", task, [*own, f"seed={seed}"])
        for seed in SEEDS
    ]


def compare(cell: tuple[Path, str, str, str]) -> str:
    """Tune one method on one task, run it with the choice, and write what came out."""
    out, task, group, method = cell
    path = out / "cells" / f"{task}-{group}-{method}.json"
    if path.exists():
        return f"{path.stem} is there"
    own = (f"strategy={method}", *OF_GROUP[group])
    scratch = out / "scratch" / path.stem
    points = trials(GROUPS[group][method])
    tried = [
        measure(scratch, task, [*own, f"{PART}tune", *point, f"seed={TUNED_ON}"])
        for point in points
    ]
    best = max(range(len(points)), key=lambda number: tried[number]["accuracy"])  # the first
    choice = ["choice=" + "_".join(word.replace("=", ":") for word in points[best])]
    runs = final_runs(out, task, group, method, [*points[best], *choice])
    shutil.rmtree(scratch, ignore_errors=True)
    of_cell = {"task": task, "group": group, "method": method}
    found = {
        "trials": [{**of_cell, "words": p, **t} for p, t in zip(points, tried, strict=True)],
        "runs": runs,
        "chosen": {**of_cell, "words": points[best]},
    }
    save_text(path, json.dumps(found) + "\n")
    return f"{path.stem} {points[best]} {[run['accuracy'] for run in runs]}"


def ready() -> None:
    """Prepare a process for single runs: one thread, Flower's identity, no log."""
    torch.set_num_threads(1)
    set_identity()
    logging.getLogger("flwr").setLevel(logging.ERROR)


def cells(out: Path, tasks: Sequence[str]) -> Iterator[tuple[Path, str, str, str]]:
    """Yield what is to be done, task by task."""
    for task in tasks:
        for group, methods in GROUPS.items():
            yield from ((out, task, group, method) for method in methods)


def collected(out: Path) -> dict[str, Any]:
    """Return the tasks on which all methods have run."""
    found: dict[str, Any] = {"tasks": [], "trials": [], "chosen": [], "runs": []}
    for task in TASKS:
        paths = [out / "cells" / f"{t}-{g}-{m}.json" for _, t, g, m in cells(out, [task])]
        if all(path.exists() for path in paths):
            found["tasks"].append(task)
            for content in (json.loads(path.read_text()) for path in paths):
                found["trials"] += content["trials"]
                found["runs"] += content["runs"]
                found["chosen"].append(content["chosen"])
    return found


def main() -> None:
    """Run what is missing, and write what is whole."""
    parser = options_of(__doc__, "comparison", 1)
    parser.add_argument("--folder", type=Path, default=Path("results/comparison"))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    folder = options.folder.absolute()
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(options.processes, ready) as pool:
        for line in pool.imap_unordered(compare, cells(folder, options.tasks)):
            print(line, flush=True)
    found = collected(folder)
    if found["tasks"]:
        found |= summarised(found)
        print(tasks_table(found), *(tables(found, group) for group in GROUPS), sep="\n\n")
        draw(found, folder)
    save(options.out, found)


if __name__ == "__main__":
    main()
