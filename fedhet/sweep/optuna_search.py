"""Searches with Optuna: their defaults, and the figure that they optimise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from fedhet.common.errors import ConfigError
from fedhet.common.metrics import BEST, larger_is_better, metric_of
from fedhet.common.results import COMPLETED
from fedhet.conf.schema import FIGURES
from fedhet.sweep.sweep_folder import JobReport

_DEFAULTS = {
    "direction": "maximize",  # accuracy
    "n_jobs": "${at_least_one:${oc.select:hydra.launcher.n_jobs,1}}",  # trials proposed at once
    "max_failure_rate": 1.0,  # a failed trial does not end the search
}


def set_defaults() -> None:
    """Give `hydra/sweeper=optuna` fedhet's defaults, and its samplers a seed.

    A file in conf/ cannot do it: the plugin's own entry in Hydra's store has the same name.
    """
    Plugins.instance()  # imports the plugins, which store their entries
    store = ConfigStore.instance()
    group = store.repo.get("hydra", {}).get("sweeper", {})
    if "optuna.yaml" not in group:
        return
    stored = store.load("hydra/sweeper/optuna.yaml")
    stored.node.merge_with(_DEFAULTS)
    store.store("optuna", stored.node, group="hydra/sweeper", provider="fedhet")
    for file in group.get("sampler", {}):
        stored = store.load(f"hydra/sweeper/sampler/{file}")
        if "seed" in stored.node:
            stored.node.seed = 0
            name = file.removesuffix(".yaml")
            store.store(name, stored.node, group="hydra/sweeper/sampler", provider="fedhet")


def is_search(sweeper: Mapping[str, Any]) -> bool:
    """Return whether the node hydra.sweeper describes a search."""
    return not str(sweeper.get("_target_")).endswith("BasicSweeper")


def direction_of(sweeper: Mapping[str, Any]) -> str:
    """Return minimize or maximize."""
    chosen = sweeper.get("direction")
    return str(getattr(chosen, "name", chosen)).lower()


def check_search(objective: str, sweeper: Mapping[str, Any]) -> None:
    """Refuse settings with which a search cannot work."""
    if not is_search(sweeper):
        return
    is_own = objective not in FIGURES and metric_of(objective.removeprefix(BEST)) is None
    if direction_of(sweeper) == "maximize" and not (is_own or larger_is_better(objective)):
        raise ConfigError(
            f"objective={objective} is better when it is smaller, and the search would maximize "
            "it: set hydra.sweeper.direction=minimize"
        )
    if sweeper.get("storage"):
        raise ConfigError(
            f"hydra.sweeper.storage={sweeper['storage']}: Optuna 2 cannot keep a study in a "
            "database with the SQLAlchemy 2 that Flower needs; leave it null. --resume continues a "
            "search: it reports the finished trials again, in the same order"
        )
    if int(sweeper.get("n_jobs") or 0) < 1:
        raise ConfigError(
            f"hydra.sweeper.n_jobs={sweeper.get('n_jobs')}: it is the number of trials that a "
            "search proposes at once; set it (and hydra.launcher.n_jobs) to 1 or more"
        )


def best_of(jobs: Sequence[JobReport], objective: str, direction: str) -> JobReport | None:
    """Return the completed job with the best objective, the first of equal ones."""
    measured = [job for job in jobs if job.status == COMPLETED and objective in job.figures]
    if not measured:
        return None
    sign = 1 if direction == "minimize" else -1
    return min(measured, key=lambda job: (sign * job.figures[objective], job.number))


OmegaConf.register_new_resolver("at_least_one", lambda number: number or 1, replace=True)
