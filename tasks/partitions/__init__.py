"""Partitions of the training examples over clients, by name; drawn once and cached."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError, require_whole
from fedhet.tasks.partitions.config import PartitionConfig
from fedhet.tasks.sources.arrays import Indices, numbered
from fedhet.tasks.sources.store import build_once, cache_folder, cache_key

__all__ = ["PartitionConfig", "hold_out", "partition_rows"]

FORMAT = 2  # version of the draws: raise it when one of them changes
HOLDOUT_STREAM = 1


def partition_rows(
    config: PartitionConfig,
    labels: Indices,
    clients: NDArray[np.str_] | None,
    *,
    num_clients: int,
    seed: int,
) -> list[Indices]:
    """Return the rows of every client, given all labels (n,) and whose each example is (n,).

    The partition's own seed overrides the run's.

    Raises:
        ConfigError: if these examples cannot be partitioned this way.
    """
    require_whole("clients", num_clients, low=1)
    if num_clients > len(labels):
        raise ConfigError(
            f"clients={num_clients} is more than the {len(labels)} training examples: lower "
            "clients or take more examples"
        )
    seed = seed if config.seed is None else config.seed
    if not 0 <= seed < 2**32:
        key = "seed" if config.seed is None else "partition.seed"
        raise ConfigError(f"{key}={seed} must be a whole number in 0..2**32 - 1")
    names, groups = ((), None) if clients is None else numbered(clients)
    identity = {
        "format": FORMAT,
        "labels": _digest(labels),
        "groups": None if groups is None else [_digest(groups), len(names)],
        "flavour": config.name,
        "options": dict(config.options),
        "clients": num_clients,
        "seed": seed,
    }

    def draw(unfinished: Path) -> None:
        from fedhet.tasks.partitions.library import draw_rows  # imports Flower Datasets: seconds

        rows = draw_rows(config, labels, groups, num_clients, seed)
        np.save(unfinished / "rows.npy", np.concatenate(rows))
        np.save(unfinished / "borders.npy", np.cumsum([len(part) for part in rows])[:-1])

    folder = cache_folder() / "partitions" / f"{config.name}-{cache_key(identity)}"
    build_once(folder, draw)
    return np.split(np.load(folder / "rows.npy"), np.load(folder / "borders.npy"))


def hold_out(rows: Indices, fraction: float, seed: int, client_id: int) -> tuple[Indices, Indices]:
    """Split a client's rows; copies of a row stay on one side.

    Returns:
        The rows to train on, in the given order, and the held-out rows: a fraction of the distinct
        rows, rounded, but at least one unless the fraction is 0. At least one stays for training.
    """
    distinct = np.unique(rows)
    if fraction == 0.0 or len(distinct) < 2:
        return rows, rows[:0]
    count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
    rng = np.random.default_rng([seed, HOLDOUT_STREAM, client_id])
    held_out = rng.choice(distinct, size=count, replace=False)
    return rows[~np.isin(rows, held_out)], np.sort(held_out)


def _digest(values: Indices) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
