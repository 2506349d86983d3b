"""Reads how many examples of each class each client holds, from the runs' class_counts.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedhet.common.results import read_counts
from fedhet.conf import FOLDER_KEYS
from fedhet.report.data_file import Partition
from fedhet.report.partition_chart import chosen_values, partition_title
from fedhet.report.run_data import Run

MOST_PARTITIONS = 12
_IRRELEVANT = (  # keys of the task that leave the partition as it is
    "model head_bias stem mean std flip crop_padding crop_probability test_size classifier_tensors"
).split()


def with_counts(known: Sequence[Partition], runs: Sequence[Run]) -> list[Partition]:
    """Return the known partitions and those of the runs that are not among them."""
    settings = [partition.settings for partition in known]
    found = [(p, run) for p, run in partitions_of(runs) if p.settings not in settings]
    counted = [_counted(partition, run) for partition, run in found[:MOST_PARTITIONS]]
    reason = f"only the first {MOST_PARTITIONS} partitions are shown"
    left_out = [replace(partition, error=reason) for partition, _ in found[MOST_PARTITIONS:]]
    return [*known, *counted, *left_out]


def partitions_of(runs: Sequence[Run]) -> list[tuple[Partition, Run]]:
    """Return the runs' partitions without counts, each with its run: of a recipe the lowest seed.

    Runs with figures of their paper come first, since these may show the counts.
    """
    found: dict[str, tuple[Partition, Run]] = {}
    for run in sorted(runs, key=lambda run: (not run.figures, run.seed or 0)):
        if settings := _settings(run):
            identity = _without(settings, "seed", *FOLDER_KEYS)
            known = json.dumps(identity, sort_keys=True)
            found.setdefault(known, (_uncounted(settings), run))
    return list(found.values())


def partition_of(run: Run, partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition of the run's recipe and seed; None if it is not among these."""
    wanted = _without(_settings(run), *FOLDER_KEYS)
    found = (p for p in partitions if _without(p.settings, *FOLDER_KEYS) == wanted)
    return next(found, None) if wanted else None


def _counted(partition: Partition, run: Run) -> Partition:
    if run.folder is None:
        return replace(partition, error="the data file has no counts")
    return replace(partition, **read_counts(run.folder))


def _without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that decide the run's partition; empty if they are unknown."""
    if not {"task.name", "partition.name"} <= set(run.settings):
        return {}
    kept = {
        key: value
        for key, value in run.settings.items()
        if (key.startswith("partition.") and key != "partition.unseen")
        or (key.startswith("task.") and key.split(".")[1] not in _IRRELEVANT)
    }
    return {**kept, "clients": run.settings.get("clients"), "seed": run.seed}


def _uncounted(settings: Mapping[str, Any]) -> Partition:
    clients, start = int(settings["clients"] or 0), "partition."
    partition = {k.removeprefix(start): v for k, v in settings.items() if k.startswith(start)}
    size = settings.get("task.train_size")
    chosen = chosen_values(partition, clients=clients, seed=settings["seed"], train_size=size)
    title = partition_title(settings["task.name"], settings["partition.name"], chosen)
    return Partition(title, settings, clients=clients)
