"""Drawing a partition of generated labels."""

import numpy as np

from tasks.partitions import PartitionConfig, partition_rows


def config(name, **options):
    return PartitionConfig.from_mapping({"name": name, **options})


def labels_of(classes, each, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), each))


def draw(name, labels=None, *, clients=10, seed=0, groups=None, **options):
    labels = labels_of(10, 300) if labels is None else labels
    if name == "natural" and groups is None:
        groups = np.arange(len(labels)) * 7 % 20
    return partition_rows(config(name, **options), labels, groups, num_clients=clients, seed=seed)


def counts(labels, rows):
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in rows])
