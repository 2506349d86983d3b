"""Which rounds fall, and whether a client with a step on one or two examples took part.

    python -m fedhet.reproductions.niid_bench.falls RUN_FOLDER...

A round falls if its accuracy is more than five points under the median of the seven rounds around
it. Prints, as JSON, the rounds with such a client and those without, how many of them fell, and
what they were counted from. docs/results/niid_bench.md, "Why single rounds fall".
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhet.commands import reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.results import METRICS, read_counts, read_rows

FIRST, AROUND, FALL, FEW, BATCH = 104, 3, 0.05, 2, 64


def read(folder: Path) -> dict[str, Any]:
    """Return a run's accuracy and clients by round from 1, and its clients' numbers of examples.

    Raises:
        ConfigError: if the run does not have these numbers.
    """
    counts = read_counts(folder)
    if "error" in counts:
        raise ConfigError(f"{folder}: {counts['error']}")
    rows = [row for row in read_rows(folder / METRICS) if row["round"] > 0]
    alarms = [client for row in rows for client in row.get("standing_out", {})]
    return {
        "name": folder.name,
        "sizes": [sum(row) for row in counts["counts"]],
        "accuracy": [row["accuracy"] for row in rows],
        "clients": [row["clients"] for row in rows],
        "stood_out": {client: alarms.count(client) for client in sorted(set(alarms), key=int)},
    }


def falls(
    accuracy: Sequence[float], clients: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[dict[str, int | bool]]:
    """Return how many rounds fell: of those with a client whose last batch is small, and others.

    Args:
        accuracy: after each round from 1, a share.
        clients: which trained in it.
        sizes: their numbers of examples.
    """
    few = {client for client, size in enumerate(sizes) if 0 < size % BATCH <= FEW}
    found = {small: {"small": small, "rounds": 0, "fell": 0} for small in (True, False)}
    for i in range(FIRST - 1, len(accuracy) - AROUND):
        median = statistics.median(accuracy[i - AROUND : i + AROUND + 1])
        kind = found[not few.isdisjoint(clients[i])]
        kind["rounds"] += 1
        kind["fell"] += accuracy[i] < median - FALL
    return list(found.values())


def main() -> None:
    """Read the folders and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    folders = parser.parse_args().folders
    with reported_errors("falls"):
        runs = [read(folder) for folder in folders]
    for run in runs:
        run["falls"] = falls(run["accuracy"], run["clients"], run["sizes"])
    print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
