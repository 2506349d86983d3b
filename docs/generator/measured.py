"""What a method reached in the comparison of tuned methods, for its page."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from docs.generator.recipes import ROOT

FILE = ROOT / "benchmarks" / "comparison.json"
_MODELS = {"global": "the global model", "personal": "the clients' own models"}
_PAPERS = {  # results of whole tables, by method
    "feddw": ["feddw"],
    "fedmrur": ["fedmrur"],
    "fedpvr": ["fedpvr"],
    "maecho": ["maecho"],
    "moon": ["feddw"],
    "scaffold": ["fedpvr"],
}


@cache
def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def measured(method: str) -> str:
    """Return a method's section; empty if it has not been measured."""
    found = _results()
    lines = [
        f"Mean rank {own['rank']:.1f} among {test['methods']} tuned methods on {test['tasks']} "
        f"small tasks, by the accuracy of {_MODELS[own['group']]}: {own['gap']:+.1f} points "
        f"to FedAvg ([the comparison](../results/comparison.md))."
        for own in found["methods"]
        for test in found["tests"]
        if own["method"] == method and own["group"] == test["group"]
    ]
    lines += [
        f"Measured on the papers' data: [results](../results/{page}.md)."
        for page in _PAPERS.get(method, ())
    ]
    return "## Measured\n\n" + " ".join(lines) if lines else ""
