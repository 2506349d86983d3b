"""A search with Optuna: its defaults, and the figure that it optimises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from fedhet.sweep.sweep_folder import JobReport, SweepRefused

FIGURES = (
    "accuracy",
    "best_accuracy",
    "loss",
    "client_accuracy",
    "client_loss",
    "rounds",
    "seconds",
    "seconds_per_round",
    "wall_seconds",
    "bytes_up",
    "bytes_down",
    "failures",
)
_BETTER_WHEN_LARGER = ("accuracy", "best_accuracy", "client_accuracy")
_DEFAULTS = {
    "direction": "maximize",  # accuracy
    "n_jobs": "${oc.select:hydra.launcher.n_jobs,1}",  # more would be proposed at once for nothing
    "max_failure_rate": 1.0,  # a failed trial does not end the search
}
_SEED = 0


def set_defaults() -> None:
    """Give `hydra/sweeper=optuna` our defaults, and its samplers a seed.

    The plugin has its group file in Hydra's store, under a name that no file of ours may have.
    """
    Plugins.instance()  # the plugins are imported, and have stored theirs
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
            stored.node.seed = _SEED
            name = file.removesuffix(".yaml")
            store.store(name, stored.node, group="hydra/sweeper/sampler", provider="fedhet")


def is_search(sweeper: Mapping[str, Any]) -> bool:
    """Return whether the node hydra.sweeper is one that optimises."""
    return not str(sweeper.get("_target_")).endswith("BasicSweeper")


def direction_of(sweeper: Mapping[str, Any]) -> str:
    """Return minimize or maximize."""
    chosen = sweeper.get("direction")
    return str(getattr(chosen, "name", chosen)).lower()


def check_search(objective: str, sweeper: Mapping[str, Any]) -> None:
    """Refuse a search that could only end badly.

    Raises:
        SweepRefused: naming the key.
    """
    if objective not in FIGURES:
        raise SweepRefused(
            f"objective={objective} is no figure of summary.json; allowed: {', '.join(FIGURES)}"
        )
    if not is_search(sweeper):
        return
    if direction_of(sweeper) == "maximize" and objective not in _BETTER_WHEN_LARGER:
        raise SweepRefused(
            f"objective={objective} is better when it is smaller, and the search would maximize "
            "it: set hydra.sweeper.direction=minimize"
        )
    if sweeper.get("storage"):
        raise SweepRefused(
            f"hydra.sweeper.storage={sweeper['storage']}: Optuna 2 cannot keep a study in a "
            "database beside the SQLAlchemy 2 that Flower needs; leave it null. A search goes on "
            "with --resume: its finished trials are told again, in the same order"
        )
    if int(sweeper.get("n_jobs") or 0) < 1:
        raise SweepRefused(
            f"hydra.sweeper.n_jobs={sweeper.get('n_jobs')}: a search needs to know how many trials "
            "to propose at once; set it (and hydra.launcher.n_jobs) to 1 or more"
        )


def best_of(jobs: Sequence[JobReport], objective: str, direction: str) -> JobReport | None:
    """Return the completed job with the best objective, the first of equal ones."""
    measured = [job for job in jobs if job.status == "completed" and objective in job.figures]
    if not measured:
        return None
    sign = 1 if direction == "minimize" else -1
    return min(measured, key=lambda job: (sign * job.figures[objective], job.number))
