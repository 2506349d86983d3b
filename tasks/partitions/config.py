"""conf/partition/*.yaml as checked values; every key is explained in those files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, require_choice, require_known_keys, require_types

COMMON = ("name", "holdout", "seed")
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
    "site": {},
}


@dataclass(frozen=True)
class PartitionConfig:
    """How the training examples are spread over clients.

    Attributes:
        name: the flavour.
        holdout: the fraction of each client's examples that it does not train on.
        seed: of the partition; None: the run's.
        options: the flavour's own keys.
    """

    name: str
    holdout: float
    seed: int | None
    options: Mapping[str, Any]

    @classmethod
    def from_mapping(cls, partition: Mapping[str, Any]) -> PartitionConfig:
        """Check a plain mapping.

        Raises:
            ConfigError: for an unknown flavour or key, or a value out of range.
        """
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
        if not (isinstance(holdout, int | float) and 0 <= holdout < 1):
            raise ConfigError(f"partition.holdout={holdout} must be in [0, 1)")
        options = defaults | {key: partition[key] for key in defaults if key in partition}
        _check_ranges(options)
        return cls(name, float(holdout), partition.get("seed"), options)


def _check_ranges(options: Mapping[str, Any]) -> None:
    if "alpha" in options and not (
        isinstance(options["alpha"], int | float) and options["alpha"] > 0
    ):
        raise ConfigError(
            f"partition.alpha={options['alpha']} must be > 0 (small: few classes a client)"
        )
    for key in ("min_size", "group_size", "shards_per_client", "classes"):
        if key in options and not (isinstance(options[key], int) and options[key] >= 1):
            raise ConfigError(f"partition.{key}={options[key]} must be a whole number, >= 1")
