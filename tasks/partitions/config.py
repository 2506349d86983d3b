"""The group partition as checked values; common/partition_settings.py has its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedhet.common.configured import checked_section
from fedhet.common.errors import require_choice
from fedhet.common.partition_settings import PARTITIONS, Partition


@dataclass(frozen=True)
class PartitionConfig:
    """The partition of the training examples over clients.

    Attributes:
        name: the flavour.
        holdout: the fraction of each client's examples that it does not train on.
        seed: the partition's seed; None: the run's.
        options: the flavour's own keys.
        unseen: clients that are never trained on, by id or name.
    """

    name: str
    holdout: float
    seed: int | None
    options: Mapping[str, Any]
    unseen: tuple[int | str, ...] = ()

    @classmethod
    def from_mapping(cls, partition: Mapping[str, Any]) -> PartitionConfig:
        """Check a plain mapping."""
        name = require_choice("partition.name", str(partition.get("name")), PARTITIONS)
        found = checked_section(PARTITIONS[name], "partition", partition)
        own = found.model_dump(exclude={*Partition.model_fields})
        return cls(name, found.holdout, found.seed, own, tuple(found.unseen))
