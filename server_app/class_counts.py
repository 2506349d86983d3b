"""Stores who holds which classes, class_counts.json, for reports and the plot of a run."""

from __future__ import annotations

import json
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log
from omegaconf import DictConfig

from fedhet.common.files import save_text
from fedhet.common.results import CLASS_COUNTS
from fedhet.tasks import AnyTask

MOST_COUNTS = 20_000  # with more, only the first clients' are stored
_SHOWN_CLASSES = 10  # in a warning


def store_class_counts(recipe: DictConfig, folder: Path, task: AnyTask) -> None:
    """Write how many examples of each class each client of a simulation holds.

    Writes nothing if the server does not divide the examples: in a deployment, with
    partition=site, and if a function gives each client its own.
    """
    at_sites = not recipe.runtime.simulation or recipe.partition.name == "site"
    if task.by_client or at_sites:
        return
    counts = task.class_counts()
    clients, classes = counts.shape
    names = task.count_names
    absent = [name for name, held in zip(names, counts.max(axis=0), strict=True) if not held]
    if (
        absent and recipe.task.get("kind") != "regression"
    ):  # its tenths may be empty in all the data
        shown = ", ".join(absent[:_SHOWN_CLASSES]) + ", ..." * (len(absent) > _SHOWN_CLASSES)
        text = "no client has an example of class %s: the model can't learn it (partition=%s)"
        log(WARNING, text, shown, recipe.partition.name)
    stored = counts[: max(1, MOST_COUNTS // max(1, classes))].tolist()
    content = {"clients": clients, "class_names": list(names), "counts": stored}
    save_text(folder / CLASS_COUNTS, json.dumps(content) + "\n")
