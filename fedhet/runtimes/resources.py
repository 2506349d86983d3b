"""CPUs, GPUs and workers that a run may use on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedhet.common.cpus import usable_cpus
from fedhet.common.errors import ConfigError

_WSL = Path("/dev/dxg")  # its GPUs have no /dev/nvidia*
MOST_CLIENTS_A_GPU = 8  # each holds a CUDA context of about half a GiB besides its model


@dataclass(frozen=True)
class Share:
    """What a run may use."""

    workers: int  # clients that train at once
    client_cpus: int
    gpus: tuple[str, ...] = ()  # values of CUDA_VISIBLE_DEVICES for the workers, in turn


def share_of_machine(recipe: DictConfig) -> Share:
    """Return a run's share: at most as many workers as CPUs, GPUs and a cohort allow."""
    share = gpu_share(recipe)
    client_cpus = int(recipe.runtime.client_cpus)
    workers = max(1, cpus_for(recipe) // client_cpus)
    if share == 0:
        return Share(workers, client_cpus)
    gpus = gpu_names()
    return Share(max(1, min(workers, int(len(gpus) / share))), client_cpus, gpus)


def check_machine(recipe: DictConfig) -> None:
    """Raise a ConfigError if this machine cannot run the recipe."""
    here = recipe.runtime.name in ("flower", "local") or recipe.runtime.get("address", "") is None
    if not here:
        return
    if OmegaConf.select(recipe, "partition.name") == "site":
        raise ConfigError(
            f"partition=site reads the folder that each node's config names, but the clients of "
            f"runtime={recipe.runtime.name} are not nodes: choose runtime=deployment, or leave "
            "partition out"
        )
    if recipe.clients == 0:
        raise ConfigError(
            f"clients=0 takes their number from the SuperNodes of runtime=deployment: with "
            f"runtime={recipe.runtime.name} set clients to 1 or more"
        )
    wanted, gpus = str(recipe.device), gpu_names()
    number = int(wanted.partition(":")[2] or 0)
    if wanted.startswith("cuda") and not (number < len(gpus) or _WSL.exists()):
        raise ConfigError(
            f"device={wanted}: this machine has {len(gpus) or 'no'} CUDA device"
            f"{'s' if len(gpus) > 1 else ''}; set device=auto or cpu"
        )


def gpu_names() -> tuple[str, ...]:
    """Return the GPUs that CUDA would see, as CUDA_VISIBLE_DEVICES names them, without torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        listed = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return tuple(name.strip() for name in listed if name.strip() not in ("", "-1"))
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def cohort_size(recipe: DictConfig) -> int:
    """Return |S|, the clients of a round (the mean if |S| is random)."""
    return max(1, int(float(recipe.participation) * int(recipe.clients) + 0.5))


def cpus_for(recipe: DictConfig) -> int:
    """Return the number of CPUs to use: at most what a cohort can use."""
    available = int(recipe.runtime.num_cpus or usable_cpus())
    least = int(recipe.runtime.client_cpus)
    return max(least, min(available, cohort_size(recipe) * least))


def gpu_share(recipe: DictConfig) -> float:
    """Return each client's share of a GPU; 0 without one."""
    runtime = recipe.runtime
    if runtime.client_gpus is not None:
        return float(runtime.client_gpus)
    gpus = 0 if recipe.device == "cpu" else len(gpu_names())
    return even_share(gpus, cpus_for(recipe) // runtime.client_cpus)


def even_share(gpus: float, clients: int) -> float:
    """Return the share of a GPU that lets ``clients`` train at once; 0 without a GPU."""
    if gpus == 0:
        return 0.0
    share = max(gpus / max(1, clients), 1 / MOST_CLIENTS_A_GPU)
    return 1.0 if share >= 1 else int(share * 10_000) / 10_000  # rounded down, so that all fit
