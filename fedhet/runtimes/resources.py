"""What a run may use of this machine: CPUs, GPUs and clients at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from common.errors import ConfigError, require_range

MOST_CLIENTS_A_GPU = 8  # each holds a CUDA context of about half a GiB besides its model


@dataclass(frozen=True)
class Share:
    """What a run gets of this machine.

    Attributes:
        workers: clients at once.
        client_cpus: CPUs of each.
        gpus: what CUDA_VISIBLE_DEVICES is to be for the workers, in turn; empty without a GPU.
    """

    workers: int
    client_cpus: int
    gpus: tuple[str, ...] = ()


def share_of_machine(recipe: DictConfig) -> Share:
    """Return the workers that a run can use: no more than its CPUs, its GPUs and a cohort allow.

    Raises:
        ConfigError: if the recipe has a size that cannot be simulated.
    """
    check_sizes(recipe)
    share = gpu_share(recipe)
    client_cpus = int(recipe.runtime.client_cpus)
    workers = max(1, cpus_for(recipe) // client_cpus)
    if share == 0:
        return Share(workers, client_cpus)
    gpus = gpu_names()
    return Share(max(1, min(workers, int(len(gpus) / share))), client_cpus, gpus)


def check_sizes(recipe: DictConfig) -> None:
    """Refuse a size that cannot be simulated.

    Raises:
        ConfigError: naming the key.
    """
    runtime = recipe.runtime
    # clients=0, in a deployment: as many as there are SuperNodes
    _require(recipe, "clients", recipe.clients, least=0 if runtime.name == "deployment" else 1)
    _require(recipe, "runtime.client_cpus", runtime.client_cpus, least=1)
    if runtime.num_cpus is not None:
        _require(recipe, "runtime.num_cpus", runtime.num_cpus, least=int(runtime.client_cpus))
    require_range("participation", recipe.participation, high=1.0, open_low=True)


def _require(recipe: DictConfig, key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{key}={value} cannot be simulated: it must be a whole number of at least {least}"
        )


def visible_gpus() -> int:
    """Return how many GPUs CUDA would see, without the seconds that asking torch takes."""
    return len(gpu_names())


def gpu_names() -> tuple[str, ...]:
    """Return the GPUs that CUDA would see, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        listed = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return tuple(name.strip() for name in listed if name.strip() not in ("", "-1"))
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def cohort_size(recipe: DictConfig) -> int:
    """Return |S|, the clients of a round (the mean where |S| is random)."""
    return max(1, int(float(recipe.participation) * int(recipe.clients) + 0.5))


def cpus_for(recipe: DictConfig) -> int:
    """Return the CPUs to use: no more than a cohort can, for each client at once takes memory."""
    available = int(recipe.runtime.num_cpus or all_cpus())
    least = int(recipe.runtime.client_cpus)
    return max(least, min(available, cohort_size(recipe) * least))


def all_cpus() -> int:
    """Return the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_share(recipe: DictConfig) -> float:
    """Return each client's share of a GPU; 0 without one."""
    runtime = recipe.runtime
    if runtime.client_gpus is not None:
        return float(runtime.client_gpus)
    gpus = 0 if recipe.device == "cpu" else visible_gpus()
    if gpus == 0:
        return 0.0
    at_once = max(1, cpus_for(recipe) // runtime.client_cpus)
    share = max(gpus / at_once, 1 / MOST_CLIENTS_A_GPU)
    return 1.0 if share >= 1 else int(share * 10_000) / 10_000  # rounded down: all of them fit
