"""conf/partition/*.yaml as checked values; those files explain every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedhet.common.errors import (
    require_choice,
    require_known_keys,
    require_range,
    require_types,
    require_whole,
)

COMMON = ("name", "holdout", "seed", "unseen")
# The keys of each flavour with their defaults.
FLAVOURS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.3, "min_size": 10, "balance": True},
    "class_prior_dirichlet": {"alpha": 0.3},
    "feddf_dirichlet": {"alpha": 0.1, "group_size": 10},
    "pathological": {"classes": 2, "equal_sizes": True},
    "shards": {"shards_per_client": 2},
    "disjoint_classes": {"sets": None},
    "natural": {"min_size": 1},
    "feature_shift": {"brightness": 0.3, "contrast": 0.5, "noise": 0.2, "rotation": 30.0},
    "site": {},
}


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
        name = partition.get("name")
        require_choice("partition.name", name, FLAVOURS)
        assert isinstance(name, str)
        defaults = FLAVOURS[name]
        require_known_keys("partition", partition, (*COMMON, *defaults))
        switches = {key: bool for key, value in defaults.items() if isinstance(value, bool)}
        kinds: dict[str, Any] = {"seed": int | None, **switches}
        given = {key: partition[key] for key in kinds if key in partition}
        require_types("partition", given, kinds)
        holdout = partition.get("holdout") or 0.0
        require_range("partition.holdout", holdout, high=1.0, open_high=True)
        options = defaults | {key: partition[key] for key in defaults if key in partition}
        if "alpha" in options:
            require_range("partition.alpha", options["alpha"], open_low=True)
        for key in FLAVOURS["feature_shift"].keys() & options.keys():
            require_range(f"partition.{key}", options[key])
        for key in {"min_size", "group_size", "shards_per_client", "classes"} & options.keys():
            require_whole(f"partition.{key}", options[key], low=1)
        unseen = tuple(partition.get("unseen") or ())
        return cls(name, float(holdout), partition.get("seed"), options, unseen)
