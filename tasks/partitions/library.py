"""Draws a partition; imports Flower Datasets, which is slow."""

from __future__ import annotations

import warnings

import numpy as np
from datasets import Dataset, disable_progress_bars
from flwr_datasets.partitioner import (
    IidPartitioner,
    NaturalIdPartitioner,
    Partitioner,
    PathologicalPartitioner,
    ShardPartitioner,
)

from fedhet.common.errors import ConfigError
from fedhet.tasks.partitions.base import GROUP, LABEL, ROW, RowPartitioner
from fedhet.tasks.partitions.class_prior import (
    ClassPriorDirichletPartitioner,
    FewClassesPartitioner,
)
from fedhet.tasks.partitions.config import PartitionConfig
from fedhet.tasks.partitions.dirichlet import ClassDirichletPartitioner, RecutDirichletPartitioner
from fedhet.tasks.partitions.disjoint import DisjointClassesPartitioner
from fedhet.tasks.sources.arrays import Indices

OURS: dict[str, type[RowPartitioner]] = {
    "dirichlet": ClassDirichletPartitioner,
    "class_prior_dirichlet": ClassPriorDirichletPartitioner,
    "feddf_dirichlet": RecutDirichletPartitioner,
    "disjoint_classes": DisjointClassesPartitioner,
}


def draw_rows(
    config: PartitionConfig,
    labels: Indices,
    groups: Indices | None,
    num_clients: int,
    seed: int,
) -> list[Indices]:
    """Return the rows of every client."""
    rows = np.arange(len(labels))
    if config.name in ("iid", "feature_shift"):  # Flower's partitioner cuts the table in its order
        rows = np.random.default_rng(seed).permutation(rows)
    if config.name == "natural":
        rows = _choose_groups(config, groups, num_clients, seed)
    table = {LABEL: labels[rows], ROW: rows}
    if groups is not None:
        table[GROUP] = groups[rows]
    per_client = config.options.get("shards_per_client", 0)
    if num_clients * per_client > len(labels):  # Flower would divide by zero
        raise ConfigError(
            f"clients={num_clients} times partition.shards_per_client={per_client} is more than "
            f"the {len(labels)} examples: lower one of them"
        )
    partitioner = build_partitioner(config, num_clients, seed)
    partitioner.dataset = Dataset.from_dict(table).with_format("numpy")
    if isinstance(partitioner, RowPartitioner):  # faster than load_partition
        return partitioner.rows()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            # pyarrow's about Dataset.sort; Flower's about classes with no client, which a run says
            warnings.simplefilter("ignore")
            return [np.asarray(partitioner.load_partition(i)[ROW][:]) for i in range(num_clients)]
    except ValueError as error:  # Flower does not know our keys
        raise ConfigError(
            f"partition={config.name} {dict(config.options)} with clients={num_clients} over "
            f"{len(rows)} examples is not possible: {error}"
        ) from error


def build_partitioner(config: PartitionConfig, num_clients: int, seed: int) -> Partitioner:
    """Return the flavour's partitioner, without a data set."""
    options = dict(config.options)
    if config.name in OURS:
        return OURS[config.name](num_clients, seed=seed, **options)
    match config.name:
        case "iid" | "feature_shift":
            return IidPartitioner(num_clients)
        case "pathological":
            classes, mode = options["classes"], options["class_assignment_mode"]
            if options["equal_sizes"]:
                return FewClassesPartitioner(num_clients, classes, mode, seed=seed)
            return PathologicalPartitioner(num_clients, LABEL, classes, mode, seed=seed)
        case "shards":
            per_client = options["shards_per_client"]
            return ShardPartitioner(num_clients, LABEL, per_client, seed=seed)
        case "natural":
            return NaturalIdPartitioner(GROUP)
    raise ConfigError(
        "partition=site divides nothing: each node reads the folder that its own node config names "
        "(data-folder)"
    )


def _choose_groups(
    config: PartitionConfig, groups: Indices | None, num_clients: int, seed: int
) -> Indices:
    """Choose one natural id per client; return their rows.

    Flower makes a client of every id in the table, by its sorted value, so the table has only the
    chosen ids.
    """
    if groups is None:
        raise ConfigError(
            "partition=natural: its clients are the values of a column, which task.client_column "
            "names; set it, or choose another partition"
        )
    ids, sizes = np.unique(groups, return_counts=True)
    large_enough = ids[sizes >= config.options["min_size"]]
    if len(large_enough) < num_clients:
        raise ConfigError(
            f"clients={num_clients} is more than the {len(large_enough)} natural ids with at least "
            f"partition.min_size={config.options['min_size']} examples"
        )
    chosen = np.random.default_rng(seed).choice(large_enough, num_clients, replace=False)
    return np.flatnonzero(np.isin(groups, chosen))
