"""Accuracy by hospital of finished runs on heart disease, as JSON for docs/results.

    python -m reproductions.flamby.heart_disease RESULTS > docs/results/flamby_heart_disease.json

RESULTS is a folder of runs, such as that of a sweep. A run's final model is measured on the test
rows of each hospital; of personalised methods (evaluation.model=clients) each hospital's own model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedhet.common.results import METRICS, is_completed, read_rows, read_summary
from fedhet.conf.trust import trust
from fedhet.load_run import label_metadata_of, model_of, recipe_of, task_of
from fedhet.report.run_data import find_runs
from fedhet.tasks.heart_disease import load

POOLED, ROWS = "pooled", "rows"


def accuracies(folder: Path) -> dict[str, float]:
    """Return the accuracy in percent at each hospital, on all rows, and on the pooled test set.

    As in FLamby, a hospital's rows are normalised by its own training rows, and those of the pooled
    test set by those of all hospitals. The models that hospitals keep have no pooled test set.
    """
    recipe = recipe_of(folder)
    inputs, labels, clients = load(path=recipe.task.path)[1]
    names, sizes = np.unique(clients, return_counts=True)
    if recipe.evaluation.model == "clients":
        row = read_rows(folder / METRICS)[-1]["per_client"]["personal_accuracy"]
        found = {str(names[int(client)]): 100 * value for client, value in row.items()}
    else:
        model = model_of(folder, task_of(recipe, label_metadata_of(folder))).eval()
        right = _right(model, inputs, labels)
        found = {str(name): 100 * float(right[clients == name].mean()) for name in names}
        pooled = load(path=recipe.task.path, normalise="pooled")[1][0]
        found[POOLED] = 100 * float(_right(model, pooled, labels).mean())
    every = sum(found[str(name)] * size for name, size in zip(names, sizes, strict=True))
    return {**found, ROWS: every / sizes.sum()}


def cells(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a record for each accuracy of each completed run below a folder."""
    for run in find_runs(folder):
        if not is_completed(run):
            continue
        trust(run)  # the user's own
        summary, recipe = read_summary(run), recipe_of(run)
        about = {"method": _method(summary, recipe), "seed": summary["seed"]}
        for where, accuracy in accuracies(run).items():
            yield {**about, "where": where, "accuracy": round(accuracy, 4)}


def _right(model: Any, inputs: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """Return for each row whether the model classifies it rightly."""
    with torch.no_grad():
        found: NDArray[Any] = model(torch.from_numpy(inputs))[1].argmax(dim=1).numpy() == labels
    return found


def _method(summary: dict[str, Any], recipe: Any) -> str:
    name = str(summary["strategy"])
    if hospitals := recipe.task.data_options.hospitals:
        return f"local_{hospitals[0]}"
    if name == "centralised":
        return POOLED
    if recipe.participation < 1:
        return "cyclic"
    return f"{name}_softmax" if recipe.task.model == "torch.nn:Linear" else name


if __name__ == "__main__":
    found = sorted(cells(Path(sys.argv[1])), key=lambda one: [str(one[k]) for k in one])
    lines = ",\n  ".join(json.dumps(one) for one in found)
    print(f'{{"cells": [\n  {lines}\n]}}')
