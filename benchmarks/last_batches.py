"""The comparison's chosen global methods once more, without steps on what an epoch leaves over.

    FEDHET_DATA=/data python -m benchmarks last_batches

A step on a single example is as long as one on 32 and can undo what the others have learned
(docs/results/niid_bench.md, "Why single rounds fall"). Runs the tasks of ``WITH_ONE``, in which a
client may have such a step, with each method's choice in benchmarks/comparison.json: with the last
batch and with ``local.drop_last=true``.

Fixed before the first run: the comparison's ranking stands if FedDyn, FedCM, FedMRUR, MoFedSAM,
FedSpeed, SCAFFOLD and FedPVR are above FedAvg in the mean over these tasks with ``drop_last``, too,
and Spearman's correlation of the methods' mean differences to FedAvg is at least .9.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

from benchmarks.comparison import GLOBAL, final_runs, ready
from benchmarks.harness import FOLDER, options_of, save
from fedhet.common.files import save_text

WITH_ONE = ("digits", "mnist_dirichlet", "mnist_many", "imdb", "synthetic", "synthetic_00")
LAST_BATCH = {"kept": (), "dropped": ("local.drop_last=true",)}
NOT_STORED = {"group", "bytes_up", "bytes_down", "cpu_seconds"}  # the comparison has them


def run(cell: tuple[str, str, list[str]]) -> list[dict[str, Any]]:
    """Return a method's runs on a task, with the last batch and without."""
    task, method, choice = cell
    found = []
    for last_batch, words in LAST_BATCH.items():
        with tempfile.TemporaryDirectory() as scratch:
            runs = final_runs(Path(scratch), task, "global", method, [*choice, *words])
        found += [
            {"last_batch": last_batch, **{k: v for k, v in one.items() if k not in NOT_STORED}}
            for one in runs
        ]
    return found


def differences(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each method's mean difference to FedAvg, in points, and Spearman's correlation."""
    keys = ["last_batch", "method", "task", "seed"]
    accuracy = 100 * pd.DataFrame(runs).set_index(keys)["accuracy"].unstack("method")
    gaps = accuracy.sub(accuracy["fedavg"], axis="index").groupby("last_batch").mean()
    others = gaps.drop(columns="fedavg")
    alike = spearmanr(others.loc["kept"], others.loc["dropped"]).statistic
    return {
        "tests": [{"methods": len(others.columns), "spearman": round(float(alike), 3)}],
        "methods": [
            {"method": name, **{key: round(float(gap), 3) for key, gap in column.items()}}
            for name, column in others.items()
        ],
    }


def main() -> None:
    """Run, and write what came out."""
    parser = options_of(__doc__, "last_batches", 1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = json.loads((FOLDER / "comparison.json").read_text())["chosen"]
    words = {
        (one["task"], one["method"]): one["words"] for one in chosen if one["group"] == "global"
    }
    cells = [(task, method, words[task, method]) for task in WITH_ONE for method in GLOBAL]
    runs: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(options.processes, ready) as pool:
        for number, found in enumerate(pool.imap(run, cells), 1):
            runs += found
            save_text(options.out, json.dumps({"runs": runs}) + "\n")  # in case it is stopped
            print(
                f"{number} of {len(cells)}: {found[0]['method']} on {found[0]['task']}", flush=True
            )
    save(options.out, {**differences(runs), "runs": runs})


if __name__ == "__main__":
    main()
