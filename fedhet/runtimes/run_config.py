"""Arguments of `flwr run`: the run config with the overrides, and the simulation's size."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedhet.common.files import expanded
from fedhet.conf import FOLDER_KEYS, HASHED_PATHS, quoted
from fedhet.runtimes.resources import cpus_for, gpu_share

_PATH_KEYS = (*FOLDER_KEYS, *HASHED_PATHS)
# A path only if there is such a file, like task.path of a data function: it may be a hub's name.
_MAYBE_PATHS = ("task.data_options.public", "system.path", "site.policy")


def app_overrides(typed: Sequence[str], recipe: DictConfig, results_dir: Path) -> list[str]:
    """Return overrides that give the apps this recipe in any working directory.

    The user's overrides, ``typed``, compose to ``recipe``; ``results_dir`` is absolute.
    """
    typed_keys = [word.split("=", 1)[0].lstrip("+~").split("@", 1)[0] for word in typed]
    overrides = [w for w, key in zip(typed, typed_keys, strict=True) if key != "results_dir"]
    overrides.append(f"results_dir={quoted(str(results_dir))}")
    for key in (*_PATH_KEYS, *_MAYBE_PATHS):
        value = OmegaConf.select(recipe, key)
        if not isinstance(value, str) or not value:
            continue
        path = expanded(value, key)
        of_function = key == "task.path" and recipe.task.get("inputs") == "own"
        if (key in _PATH_KEYS and not of_function) or path.exists():
            overrides.append(f"{key}={quoted(str(path.absolute()))}")
    if OmegaConf.is_dict(policies := recipe.site.policy):  # by client
        for client, file in policies.items():
            path = expanded(file, "site.policy").absolute()
            overrides.append(f"site.policy={{{client}:{quoted(str(path))}}}")
    return overrides


def run_config_toml(overrides: Sequence[str]) -> str:
    """Return the run config as the TOML file that `flwr run --run-config` reads."""
    # A JSON string without surrogate pairs is a TOML basic string.
    return f"overrides = {json.dumps(json.dumps(list(overrides)), ensure_ascii=False)}\n"


def federation_config(recipe: DictConfig) -> str:
    """Return the simulation's size as `flwr run --federation-config` reads it."""
    runtime, cpus = recipe.runtime, cpus_for(recipe)
    words = [
        f"num-supernodes={recipe.clients}",
        f"client-resources-num-cpus={runtime.client_cpus}",
        f"client-resources-num-gpus={gpu_share(recipe)}",
        "init-args-logging-level='error'",
    ]
    # By default Ray counts the CPUs: it knows cgroups, but not the affinity.
    if runtime.num_cpus is not None or cpus < (os.cpu_count() or 1):
        words.append(f"init-args-num-cpus={cpus}")
    return " ".join(words)
