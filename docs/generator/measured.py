"""What the methods reached on one common task: docs/results/methods.json, as pages show it."""

from __future__ import annotations

import json
import statistics
from typing import Any

from docs.generator.markdown import table
from docs.generator.recipes import ROOT

FILE = ROOT / "docs" / "results" / "methods.json"
_BASELINE = "fedavg"
_PAPERS = {  # results of whole tables, by method
    "feddw": ["feddw"],
    "fedmrur": ["fedmrur"],
    "fedpvr": ["fedpvr"],
    "maecho": ["maecho"],
    "moon": ["feddw"],
    "scaffold": ["fedpvr"],
}


def results() -> dict[str, Any]:
    """Return the file: how it was measured, and by method the accuracies of its seeds."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def measured(method: str) -> str:
    """Return a method's section; empty if it has not been measured."""
    found = results()
    own = found["accuracy"].get(method)
    if own is None:
        return ""
    lines = [f"{_accuracy(own)} on {found['how']}."]
    if method != _BASELINE and method in found["rounds"]:
        lines.append(f"FedAvg has {_accuracy(found['accuracy'][_BASELINE])} there.")
    lines.append("See [all methods beside each other](../choosing.md#measured-on-one-task).")
    for page in _PAPERS.get(method, ()):
        lines.append(f"Measured on the papers' data: [results](../results/{page}.md).")
    return "## Measured\n\n" + " ".join(lines)


def measured_table() -> str:
    """Return all methods, best first, as a table."""
    found = results()
    rows = sorted(found["accuracy"].items(), key=lambda row: -statistics.mean(row[1]))
    return table(
        ["method", "accuracy", "rounds", "whose model"],
        [
            [
                f"[{name}](methods/{name}.md)",
                _accuracy(scores),
                str(found["rounds"].get(name, 1)),
                "the clients' own" if name in found["clients_own"] else "global",
            ]
            for name, scores in rows
        ],
    )


def _accuracy(scores: list[float]) -> str:
    mean = f"{100 * statistics.mean(scores):.1f} %"
    if len(scores) == 1:
        return f"{mean} (one seed)"
    return f"{mean} ± {100 * statistics.stdev(scores):.1f} ({len(scores)} seeds)"
