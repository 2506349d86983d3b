"""What the methods reached on one common task: docs/results/methods.json, as pages show it.

``python -m docs.generator.measured SWEEP ...`` writes the runs of these sweeps into the file, which
keeps the other methods:

    fedhet -m partition.alpha=0.1 rounds=20 seed=0,1,2 strategy=fedavg,fedprox,...
    fedhet -m partition.alpha=0.1 seed=0,1,2 strategy=average,ensemble,maecho,...    one round
    fedhet -m partition.alpha=0.1 rounds=20 strategy=fedavg,ffa_lora,... \
      task.model=benchmarks.lora:rows_transformer \
      'task.lora={r:4,alpha:8,target_modules:[q,k,v,out,up,down]}'                   LoRA's
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from docs.generator.markdown import table
from docs.generator.recipes import ROOT
from fedhet.common.results import COMPLETED, SUMMARY, read_config, read_summary

FILE = ROOT / "docs" / "results" / "methods.json"
COMPARISON = ROOT / "benchmarks" / "comparison.json"
_MODELS = {"global": "the global model", "personal": "the clients' own models"}
_BASELINE = "fedavg"
_HOW = (
    "digits, a perceptron (LoRA's methods: adapters of rank 4 in a small transformer with random "
    "weights), 10 clients, `partition.alpha=0.1`, 20 rounds (one-shot methods: 1), otherwise each "
    "recipe's defaults"
)
_NETWORKS = {"accuracy": "perceptron", "adapted": "transformer, adapters"}  # lists of the file
_PAPERS = {  # results of whole tables, by method
    "feddw": ["feddw"],
    "fedmrur": ["fedmrur"],
    "fedpvr": ["fedpvr"],
    "maecho": ["maecho"],
    "moon": ["feddw"],
    "scaffold": ["fedpvr"],
}


def results() -> dict[str, Any]:
    """Return the file: how it was measured, and by network and method the accuracies of seeds."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def measured(method: str) -> str:
    """Return a method's section; empty if it has not been measured."""
    found = results()
    network = next((one for one in _NETWORKS if method in found[one]), None)
    if network is None:
        return ""
    own = found[network][method]
    lines = [*_ranks(method), f"{_accuracy(own)} on {found['how']}."]
    if method in found["clients_own"]:
        lines.append("That is the mean of the clients' own models on the test set of all classes.")
    if method != _BASELINE and found["rounds"][method] > 1:
        lines.append(f"FedAvg has {_accuracy(found[network][_BASELINE])} there.")
    lines.append("See [all methods beside each other](../choosing.md#every-method-on-one-task).")
    for page in _PAPERS.get(method, ()):
        lines.append(f"Measured on the papers' data: [results](../results/{page}.md).")
    return "## Measured\n\n" + " ".join(lines)


def _ranks(method: str) -> list[str]:
    """Return a method's place in the comparison of tuned methods, a sentence for each group."""
    found = json.loads(COMPARISON.read_text(encoding="utf-8"))
    tests = {test["group"]: test for test in found["tests"] if test["scope"] == "all"}
    return [
        f"Mean rank {own['rank']:.1f} of {tests[own['group']]['methods']} tuned methods on "
        f"{tests[own['group']]['tasks']} small tasks, by the accuracy of {_MODELS[own['group']]}: "
        f"{own['gap']:+.1f} points to FedAvg ([the comparison](../results/comparison.md))."
        for own in found["methods"]
        if own["method"] == method
    ]


def measured_table() -> str:
    """Return all methods, best first, as a table."""
    found = results()
    rows = [(one, *row) for one in _NETWORKS for row in found[one].items()]
    rows.sort(key=lambda row: -statistics.mean(row[2]))
    return table(
        ["method", "accuracy", "rounds", "whose model", "network"],
        [
            [
                f"[{name}](methods/{name}.md)",
                _accuracy(scores),
                str(found["rounds"][name]),
                "the clients' own" if name in found["clients_own"] else "global",
                _NETWORKS[network],
            ]
            for network, name, scores in rows
        ],
    )


def _accuracy(scores: list[float]) -> str:
    mean = f"{100 * statistics.mean(scores):.1f} %"
    if len(scores) == 1:
        return f"{mean} (one seed)"
    return f"{mean} ± {100 * statistics.stdev(scores):.1f} ({len(scores)} seeds)"


def main(sweeps: Sequence[str]) -> None:
    """Write the completed runs of sweeps into the file."""
    found = results()
    accuracy: dict[tuple[str, str], dict[int, float]] = {}
    own = set(found["clients_own"])
    for path in sorted(path for sweep in sweeps for path in Path(sweep).glob(f"*/{SUMMARY}")):
        summary = read_summary(path.parent)
        if summary["status"] == COMPLETED:
            recipe = yaml.safe_load(read_config(path.parent, summary))
            network = "adapted" if recipe["task"].get("lora") else "accuracy"
            scores = accuracy.setdefault((network, summary["strategy"]), {})
            scores[summary["seed"]] = round(summary["accuracy"], 4)
            found["rounds"][summary["strategy"]] = summary["rounds"]
            scores_own = recipe["evaluation"]["model"] == "clients"
            (own.add if scores_own else own.discard)(summary["strategy"])
    for (network, name), by in accuracy.items():
        found[network][name] = [by[seed] for seed in sorted(by)]
    found |= {"how": _HOW, "clients_own": sorted(own)}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
