"""Counts how many examples of each class each client holds, from the runs' recipes.

A process of its own counts, since counting imports torch. Examples come from the cache or from
files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from fedhet.conf import FOLDER_KEYS
from fedhet.report.data_file import Partition
from fedhet.report.partition_plot import chosen_values, partition_title
from fedhet.report.run_data import Run
from fedhet.report.subprocess_call import CallError, call

TIMEOUT_SECONDS = 300
MOST_PARTITIONS = 12
MOST_COUNTS = 20_000  # of a partition in the data file: the first clients, if there are more
_IRRELEVANT = (  # keys of the task that leave the partition as it is
    "model head_bias stem mean std flip crop_padding crop_probability test_size classifier_tensors"
).split()


def partitions_of(runs: Sequence[Run]) -> list[Partition]:
    """Return the runs' partitions without counts: the lowest seed of each recipe.

    Runs with figures of their paper come first, since these may show the counts.
    """
    found: dict[str, Partition] = {}
    for run in sorted(runs, key=lambda run: (not run.figures, run.seed or 0)):
        if settings := _settings(run):
            identity = _without(settings, "seed", *FOLDER_KEYS)
            found.setdefault(json.dumps(identity, sort_keys=True), _uncounted(settings))
    return list(found.values())


def partition_of(run: Run, partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition of the run's recipe and seed; None if it is not among these."""
    wanted = _without(_settings(run), *FOLDER_KEYS)
    found = (p for p in partitions if _without(p.settings, *FOLDER_KEYS) == wanted)
    return next(found, None) if wanted else None


def _without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that decide the run's partition; empty if they are unknown."""
    if not {"task.name", "partition.name"} <= set(run.settings):
        return {}
    kept = {
        key: value
        for key, value in run.settings.items()
        if key.startswith("partition.")
        or (key.startswith("task.") and key.split(".")[1] not in _IRRELEVANT)
    }
    return {**kept, "clients": run.settings.get("clients"), "seed": run.seed}


def _uncounted(settings: Mapping[str, Any]) -> Partition:
    clients, partition = int(settings["clients"] or 0), _group(settings, "partition")
    size = settings.get("task.train_size")
    chosen = chosen_values(partition, clients=clients, seed=settings["seed"], train_size=size)
    title = partition_title(settings["task.name"], settings["partition.name"], chosen)
    return Partition(title, settings, clients=clients)


def _group(settings: Mapping[str, Any], group: str) -> dict[str, Any]:
    start = f"{group}."
    return {k.removeprefix(start): v for k, v in settings.items() if k.startswith(start)}


def start_counting(
    known: Sequence[Partition], runs: Sequence[Run]
) -> Callable[[], list[Partition]]:
    """Start to count the runs' partitions that are not known; the result waits for the counts."""
    settings = [partition.settings for partition in known]
    uncounted = [p for p in partitions_of(runs) if p.settings not in settings]
    wanted, left_out = uncounted[:MOST_PARTITIONS], uncounted[MOST_PARTITIONS:]
    reason = f"only the first {MOST_PARTITIONS} partitions are counted"
    others = [*known, *(replace(partition, error=reason) for partition in left_out)]
    if not wanted:
        return lambda: others
    future = ThreadPoolExecutor(1).submit(_counted, wanted)
    return lambda: [*known, *future.result(), *others[len(known) :]]


def _counted(wanted: Sequence[Partition]) -> list[Partition]:
    question = [dict(partition.settings) for partition in wanted]
    try:
        answers = call("fedhet.report.class_counts", question, TIMEOUT_SECONDS)
    except CallError as error:
        return [replace(partition, error=f"counting failed: {error}") for partition in wanted]
    return [replace(p, **answer) for p, answer in zip(wanted, answers, strict=True)]


def count(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class names and counts of one partition, or the error that prevents them."""
    from fedhet.common.errors import ConfigError
    from fedhet.tasks import build_task

    if settings["partition.name"] == "site":
        return {"error": "every node has data of its own (partition=site)"}
    irrelevant: dict[str, Any] = {"model": "mlp"}
    if "task.channels" in settings:  # of images
        channels = int(settings["task.channels"])
        irrelevant |= {"mean": [0.0] * channels, "std": [1.0] * channels}
    try:
        task = build_task(
            {**irrelevant, **_group(settings, "task")},
            _group(settings, "partition"),
            seed=int(settings["seed"]),
            num_clients=int(settings["clients"]),
        )
        counts = task.class_counts()
    except (ConfigError, OSError) as error:
        return {"error": str(error)}
    shown = max(1, MOST_COUNTS // max(1, counts.shape[1]))
    return {"class_names": list(task.class_names), "counts": counts[:shown].tolist()}


if __name__ == "__main__":
    print(json.dumps([count(settings) for settings in json.load(sys.stdin)]))
