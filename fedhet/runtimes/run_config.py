"""What the launcher hands to `flwr run`: the run config and the size of the simulation, as text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from conf import FOLDER_KEYS, quoted
from fedhet.runtimes.resources import check_sizes, cpus_for, gpu_share

_PATH_KEYS = (*FOLDER_KEYS, "task.vocabulary_file")


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
        f"client-resources-num-gpus={gpu_share(recipe)}",
        "init-args-logging-level='error'",
    ]
    cpus = cpus_for(recipe)
    if runtime.num_cpus is not None or cpus < (
        os.cpu_count() or 1
    ):  # else Ray counts: it knows of cgroups, not of affinity
        words.append(f"init-args-num-cpus={cpus}")
    return " ".join(words)


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~").split("@", 1)[0]
