"""Which client holds how many examples of which class, rebuilt from the runs' recipes.

Examples come from the cache or from files. The counting is a process of its own, for it imports
torch: it runs while the curves are drawn, and a report without it needs no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from conf import FOLDER_KEYS
from fedhet.report.data_file import Partition
from fedhet.report.partition_plot import chosen_values, partition_title
from fedhet.report.run_data import Run

TIMEOUT_SECONDS = 300
MOST_PARTITIONS = 12
MOST_COUNTS = 20_000  # of a partition in the data file: the first clients, where there are more
# What does not change who holds what.
_NOT_COUNTED = (
    "model head_bias stem mean std flip crop_padding crop_probability test_size classifier_tensors"
).split()


def partitions_of(runs: Sequence[Run]) -> list[Partition]:
    """Return the runs' partitions, yet without counts: of each recipe that of its lowest seed.

    Runs that show their clients' heads come first, for these are shown beside the counts.
    """
    found: dict[str, Partition] = {}
    for run in sorted(runs, key=lambda run: (run.head_norms is None, run.seed or 0)):
        if not _has_partition(run):
            continue
        settings = _settings(run)
        identity = {k: v for k, v in settings.items() if k not in ("seed", *FOLDER_KEYS)}
        found.setdefault(json.dumps(identity, sort_keys=True), _uncounted(settings))
    return list(found.values())


def partition_of(run: Run, partitions: Sequence[Partition]) -> Partition | None:
    """Return the run's own partition, of its own seed; None where that is not among them."""
    if not _has_partition(run):
        return None
    wanted = _wherever(_settings(run))
    return next((p for p in partitions if _wherever(p.settings) == wanted), None)


def _has_partition(run: Run) -> bool:
    return "task.name" in run.settings and "partition.name" in run.settings


def _wherever(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in FOLDER_KEYS}


def _settings(run: Run) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in run.settings.items()
        if key.startswith("partition.")
        or (key.startswith("task.") and key.split(".")[1] not in _NOT_COUNTED)
    }
    return {**kept, "clients": run.settings.get("clients"), "seed": run.seed}


def _uncounted(settings: Mapping[str, Any]) -> Partition:
    clients = int(settings["clients"] or 0)
    chosen = chosen_values(
        _part(settings, "partition"),
        clients=clients,
        seed=settings["seed"],
        train_size=settings.get("task.train_size"),
    )
    title = partition_title(settings["task.name"], settings["partition.name"], chosen)
    return Partition(title, settings, clients=clients)


def _part(settings: Mapping[str, Any], group: str) -> dict[str, Any]:
    return {
        key.partition(".")[2]: value
        for key, value in settings.items()
        if key.startswith(f"{group}.")
    }


class Counting:
    """Counts in a process of its own; ``result`` waits for it.

    Args:
        known: partitions that need no counting.
        runs: whose partitions are to be counted, unless they are known.
    """

    def __init__(self, known: Sequence[Partition], runs: Sequence[Run]) -> None:
        settings = [partition.settings for partition in known]
        wanted = [p for p in partitions_of(runs) if p.settings not in settings]
        self._known = known
        self._wanted = wanted[:MOST_PARTITIONS]
        self._left_out = wanted[MOST_PARTITIONS:]
        self._process = self._start() if self._wanted else None
        self._result: list[Partition] | None = None

    def _start(self) -> subprocess.Popen[str]:
        # The report is about what is there: it downloads nothing.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "fedhet.report.class_counts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **offline},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps([dict(p.settings) for p in self._wanted]))
        process.stdin.close()
        process.stdin = None  # else communicate() would flush what is closed
        return process

    def result(self) -> list[Partition]:
        """Return the partitions with counts, or with the reason why there are none."""
        if self._result is None:
            reason = f"only the first {MOST_PARTITIONS} partitions are counted"
            left_out = [_failed(partition, reason) for partition in self._left_out]
            self._result = [*self._known, *self._counted(), *left_out]
        return self._result

    def _counted(self) -> list[Partition]:
        if self._process is None:
            return []
        try:
            printed, complaints = self._process.communicate(timeout=TIMEOUT_SECONDS)
            answers = json.loads(printed.splitlines()[-1])
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            reason = f"counting took longer than {TIMEOUT_SECONDS} s"
            return [_failed(partition, reason) for partition in self._wanted]
        except (ValueError, IndexError):
            reason = f"counting failed: {complaints.strip()[-300:]}"
            return [_failed(partition, reason) for partition in self._wanted]
        return [
            Partition(p.title, p.settings, clients=p.clients, **answer)
            for p, answer in zip(self._wanted, answers, strict=True)
        ]


def _failed(partition: Partition, reason: str) -> Partition:
    return Partition(partition.title, partition.settings, clients=partition.clients, error=reason)


# ---- the process ---------------------------------------------------------------------------------


def count(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class names and counts of one partition, or the error that prevents them."""
    from common.errors import ConfigError
    from tasks import build_task

    if settings["partition.name"] == "site":
        return {"error": "every node has data of its own (partition=site)"}
    uncounted: dict[str, Any] = {"model": "mlp"}
    if "task.channels" in settings:  # of images
        channels = int(settings["task.channels"])
        uncounted |= {"mean": [0.0] * channels, "std": [1.0] * channels}
    try:
        task = build_task(
            {**uncounted, **_part(settings, "task")},
            _part(settings, "partition"),
            seed=int(settings["seed"]),
            num_clients=int(settings["clients"]),
        )
        counts = task.class_counts()
    except (ConfigError, OSError) as error:
        return {"error": str(error)}
    shown = max(1, MOST_COUNTS // max(1, counts.shape[1]))
    return {"class_names": list(task.class_names), "counts": counts[:shown].tolist()}


def main() -> None:
    """Answer the settings on standard input with counts on standard output."""
    print(json.dumps([count(settings) for settings in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
