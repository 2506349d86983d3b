"""Renamed recipe keys and modules: refuses old ones, and reads the config.yaml of older runs.

``KEYS`` has the old key and those of today; of two, each belongs to the method in its name. Results
directories of format 1 (``common.results.FORMAT``) have the old names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedhet.common.errors import ConfigError

KEYS: dict[str, tuple[str, ...]] = {
    "strategy.client_sides.fedprox.mu": ("strategy.fedprox.mu",),
    "strategy.option": ("strategy.scaffold.option", "strategy.fedpvr.option"),
    "strategy.layers": ("strategy.fedpvr.layers",),
    "local.solver": ("local.optimizer",),
    "local.solvers": ("local.optimizers",),
    "local.trained_by": ("local.reuse_training",),
    "strategy.pfnm.most": ("strategy.pfnm.max_neurons",),
    "strategy.fedma.most": ("strategy.fedma.max_neurons",),
    "strategy.output.most": ("strategy.output.max_neurons",),
}
MODULES = {
    "strategies.aggregators": "strategies.components.aggregators",
    "strategies.alignment": "strategies.fusion.neuron_alignment",
    "strategies.chains": "strategies.fusion.layer_chain",
    "strategies.class_counts": "strategies.statistics.class_counts",
    "strategies.differential_privacy": "strategies.modes.private.differential_privacy",
    "strategies.differential_privacy.AdaptiveNorm": (
        "strategies.modes.private.clipping.AdaptiveNorm"
    ),
    "strategies.differential_privacy.FixedNorm": "strategies.modes.private.clipping.FixedNorm",
    "strategies.dense.Distillation": "strategies.fusion.distillation.Distillation",
    "strategies.dense.Generation": "strategies.fusion.distillation.Generation",
    "strategies.masked_mean": "strategies.average",
    "strategies.outputs": "strategies.components.model_outputs",
    "strategies.per_fedavg.PerFedAvgSolver": "strategies.per_fedavg.PerFedAvgOptimizer",
    "strategies.privacy.GaussianMechanism": (
        "strategies.modes.private.gaussian_mechanism.GaussianMechanism"
    ),
    "strategies.projected": "strategies.fusion.projected_layers",
    "strategies.projections": "strategies.fusion.projections",
    "strategies.samplers": "strategies.components.samplers",
    "strategies.schedules": "strategies.components.schedules",
    "strategies.secure_aggregation": "strategies.modes.secure.aggregation",
    "strategies.server_optimizers": "strategies.components.server_optimizers",
    "strategies.soft_labels": "strategies.statistics.soft_labels",
    "strategies.solvers": "strategies.components.local_optimizers",
}
_LEVEL = "\0"  # between the keys of a path; a key may itself have dots
_TARGET = re.compile(
    "|".join(
        rf"{re.escape(old)}(?=\.|\Z)"
        for old in sorted(MODULES, key=len, reverse=True)  # the most specific first
    )
)
_CLASS = re.compile(r"(?:strategies|server_app)(?:\.[a-z_]+)+\.[A-Z]\w*\Z")  # now in fedhet
_DENSE = re.compile(r"\Astrategy[.\0].*[.\0]dense\Z")  # projections sent as P: gone
_SIDE = re.compile(r"strategy[.\0]client_sides[.\0](\w+)")
_SLOTS = re.compile(r"strategy[.\0]methods[.\0]")


def refuse_old_keys(overrides: Iterable[str]) -> None:
    """Refuse overrides (``key=value``) of keys that have been renamed."""
    for word in overrides:
        key, equals, value = word.lstrip("+~").partition("=")
        for old, new in KEYS.items():
            if key == old or key.startswith(f"{old}."):
                today = " or ".join(f"{name}{key[len(old) :]}{equals}{value}" for name in new)
                raise ConfigError(f"{key} has been renamed: write {today}")


def upgrade_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, nested or flat with dotted keys, with the keys and modules of today."""
    values = list(leaves(config, _LEVEL))
    methods = {found[1] for path, _ in values if (found := _SIDE.match(path))}
    upgraded: dict[str, Any] = {}
    for path, value in values:
        if _DENSE.search(path) and isinstance(value, bool):
            continue
        for new in _paths_of_today(path, methods):
            *parents, name = new.split(_LEVEL)
            node = upgraded
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = _value_of_today(path, value)
    return upgraded


def leaves(node: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values below mappings and the paths to them; lists are values."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def _paths_of_today(path: str, methods: set[str]) -> list[str]:
    for old, new in KEYS.items():
        pattern = re.escape(old).replace(r"\.", "[.\0]")
        if found := re.search(rf"(?<![^.\0]){pattern}(?![^.\0])", path):
            separator = _LEVEL if _LEVEL in found[0] else "."
            moved = [
                path[: found.start()] + name.replace(".", separator) + path[found.end() :]
                for name in new
                if len(new) == 1 or name.split(".")[1] in methods
            ]
            # the side keeps a reference to the method's key
            return [*moved, path] if _SIDE.match(old) else moved
    return [path]


def _value_of_today(path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_value_of_today(path, one) for one in value]
    if value == "solver" and _SLOTS.match(path):
        return "optimizer"
    if not isinstance(value, str):
        return value
    if found := _TARGET.match(value):
        value = MODULES[found[0]] + value[found.end() :]
    return f"fedhet.{value}" if _CLASS.match(value) else value
