"""What the launcher hands to `flwr run`: the run config and the size of the simulation, as text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from conf import quoted

_PATH_KEYS = ("task.path", "partition.path")
_MOST_CLIENTS_A_GPU = 8  # each holds a CUDA context of about half a GiB besides its model


def app_overrides(typed: Sequence[str], recipe: DictConfig, results_dir: Path) -> list[str]:
    """Return the overrides that give the apps this recipe in a working directory of their own.

    Args:
        typed: the user's overrides as they were typed.
        recipe: what they compose to.
        results_dir: the run's results directory, absolute.
    """
    overrides = [word for word in typed if _key(word) != "results_dir"]
    overrides.append(f"results_dir={quoted(str(results_dir))}")
    for key in _PATH_KEYS:
        value = OmegaConf.select(recipe, key)
        if isinstance(value, str) and value:
            overrides.append(f"{key}={quoted(str(Path(value).expanduser().absolute()))}")
    return overrides


def run_config_toml(overrides: Sequence[str]) -> str:
    """Return the run config as the TOML file that `flwr run --run-config` reads."""
    # A JSON string is a TOML basic string as long as no surrogate pairs are in it.
    return f"overrides = {json.dumps(json.dumps(list(overrides)), ensure_ascii=False)}\n"


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
        ValueError: if the recipe has a size that cannot be simulated.
    """
    check_sizes(recipe)
    share = _gpu_share(recipe)
    client_cpus = int(recipe.runtime.client_cpus)
    workers = max(1, _cpus(recipe) // client_cpus)
    if share == 0:
        return Share(workers, client_cpus)
    gpus = _gpu_names()
    return Share(max(1, min(workers, int(len(gpus) / share))), client_cpus, gpus)


def federation_config(recipe: DictConfig) -> str:
    """Return the size of the simulation as `flwr run --federation-config` takes it.

    Raises:
        ValueError: if the recipe has a size that Flower's simulation cannot have.
    """
    runtime = recipe.runtime
    check_sizes(recipe)
    words = [
        f"num-supernodes={recipe.clients}",
        f"client-resources-num-cpus={runtime.client_cpus}",
        f"client-resources-num-gpus={_gpu_share(recipe)}",
        "init-args-logging-level='error'",
    ]
    cpus = _cpus(recipe)
    if runtime.num_cpus is not None or cpus < _all_cpus():  # else Ray counts: it knows of cgroups
        words.append(f"init-args-num-cpus={cpus}")
    return " ".join(words)


def visible_gpus() -> int:
    """Return how many GPUs CUDA would see, without the seconds that asking torch takes."""
    return len(_gpu_names())


def _gpu_names() -> tuple[str, ...]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        listed = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return tuple(name.strip() for name in listed if name.strip() not in ("", "-1"))
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _cpus(recipe: DictConfig) -> int:
    """Return the CPUs to use: no more than a cohort can, for each client at once takes memory."""
    cohort = max(1, math.ceil(float(recipe.participation) * int(recipe.clients)))
    available = int(recipe.runtime.num_cpus or _all_cpus())
    least = int(recipe.runtime.client_cpus)
    return max(least, min(available, cohort * least))


def _all_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu_share(recipe: DictConfig) -> float:
    runtime = recipe.runtime
    if runtime.client_gpus is not None:
        return float(runtime.client_gpus)
    gpus = 0 if recipe.device == "cpu" else visible_gpus()
    if gpus == 0:
        return 0.0
    at_once = max(1, _cpus(recipe) // runtime.client_cpus)
    share = max(gpus / at_once, 1 / _MOST_CLIENTS_A_GPU)
    return 1.0 if share >= 1 else int(share * 10_000) / 10_000  # rounded down: all of them fit


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~").split("@", 1)[0]


def check_sizes(recipe: DictConfig) -> None:
    """Refuse a size that cannot be simulated.

    Raises:
        ValueError: naming the key.
    """
    runtime = recipe.runtime
    _require(recipe, "clients", recipe.clients, least=1)
    _require(recipe, "runtime.client_cpus", runtime.client_cpus, least=1)
    if runtime.num_cpus is not None:
        _require(recipe, "runtime.num_cpus", runtime.num_cpus, least=int(runtime.client_cpus))


def _require(recipe: DictConfig, key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"{key}={value} cannot be simulated: it must be a whole number of at least {least}"
        )
