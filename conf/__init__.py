"""The recipe: Hydra's composition of conf/, the same on the server and on every client.

Flower's run config carries the user's overrides; both apps compose the recipe from it, and compare
hashes of the recipe and of the code before round 1.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from fedhet.common.errors import ConfigError
from fedhet.common.nested import leaves
from fedhet.common.outside import import_target
from fedhet.conf.check import checked
from fedhet.conf.composition import composed
from fedhet.conf.composition import quoted as quoted
from fedhet.conf.composition import with_open_keys as with_open_keys
from fedhet.conf.mistakes import explain, one_line
from fedhet.conf.project import FOLDER as FOLDER
from fedhet.conf.project import code_hash, conf_folders, own_code
from fedhet.conf.relations import joined_methods

PACKAGES = ("common", "conf", "strategies", "tasks", "client_app", "server_app")
# Where a run happens and what it writes: each site's own, not part of the recipe.
SITE_KEYS = ("device", "runtime", "results_dir", "resume", "checkpoint", "logger", "site")
# Notes on a run, which change nothing in it.
NOTES = ("objective", "choice", "paper", "diagnostics", "calibration")
# Folders of each machine, whose content belongs to the recipe.
FOLDER_KEYS = ("task.path", "local.reuse_training")
# Files of each machine that are named in the recipe's hash.
HASHED_PATHS = ("task.vocabulary_file", "initial_model.path")
# What a resumed run may change.
LONGER = ("rounds", "target_accuracy", "evaluation", "early_stopping")

RunConfig = Mapping[str, bool | float | int | str]


def overrides_of(run_config: RunConfig) -> list[str]:
    """Return the Hydra overrides that a Flower run config stands for.

    Every key but ``overrides`` is a recipe key; "" keeps the recipe's value. ``overrides`` holds
    further ones: a JSON list of strings, or words as in a shell.
    """
    given = {key: value for key, value in run_config.items() if key != "overrides"}
    words = [f"{key}={quote(value)}" for key, value in given.items() if value != ""]
    return [*words, *_words_in(str(run_config.get("overrides", "")).strip())]


@lru_cache(maxsize=64)  # read for every message to a client
def _words_in(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text) if text.startswith("[") else shlex.split(text))


def quote(value: bool | float | int | str) -> str:
    """Return a run config's value as an override has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str) or value.startswith("[") or re.fullmatch(r"[\w.+-]+", value):
        return str(value)
    return quoted(value)


def words_of(overrides: Any) -> list[str]:
    """Return the overrides that Hydra keeps as they were typed: references stay references."""
    return [str(word) for word in OmegaConf.to_container(overrides) or ()]


def compose(run_config: RunConfig) -> DictConfig:
    """Compose and check the recipe of a Flower run config."""
    return compose_overrides(tuple(overrides_of(run_config))).copy()


def compose_overrides(overrides: tuple[str, ...]) -> DictConfig:
    """Compose the recipe of these Hydra overrides; shared by all callers, so not to be edited.

    Raises:
        ConfigError: for an override that is unknown, or out of range.
    """
    folders = conf_folders()
    return _handed_over.get((overrides, folders)) or _checked_recipe(overrides, folders)


def hand_over(overrides: tuple[str, ...], recipe: DictConfig, code: str) -> None:
    """Let this process take over a recipe that another one has composed, and its code's hash."""
    _handed_over[overrides, conf_folders()] = recipe
    _code_hashes[_code_of(recipe)] = code


_handed_over: dict[tuple[tuple[str, ...], tuple[Path, ...]], DictConfig] = {}


@lru_cache(maxsize=64)  # a simulation's worker composes once, not once a message
def _checked_recipe(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> DictConfig:
    try:
        recipe = composed(overrides)
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        raise explain_words(error, overrides) from None
    return checked(recipe, overrides)


def explain_words(error: Exception, words: Sequence[str]) -> ConfigError:
    """Return what Hydra has raised for these words as one line, with the nearest keys."""
    return explain(error, words, composed)


def method_name(recipe: DictConfig) -> str:
    """Return the name of the method, or of the composition in alphabetical order."""
    return joined_methods(recipe.strategy.methods)


def identity(recipe: DictConfig) -> dict[str, Any]:
    """Return what summary.json says of a recipe: method, task, model, partition, clients, seed."""
    return {
        "strategy": method_name(recipe),
        "task": recipe.task.name,
        "model": recipe.task.model,
        "partition": recipe.partition.name,
        "clients": int(recipe.clients),
        "seed": int(recipe.seed),
    }


# Hydra's own ${hydra.runtime.choices.strategy} is missing where several methods are chosen.
OmegaConf.register_new_resolver("method_name", joined_methods, replace=True)


def build_part(recipe: DictConfig, key: str, classifier_tensors: int) -> Any:
    """Instantiate one part of the recipe, such as ``strategy.client_sides``.

    ``classifier_tensors``, how many of the model's last tensors are its classifier, is what recipes
    refer to as ``${task.classifier_tensors}``.
    """
    try:
        node = OmegaConf.select(recipe, key)
        require_classes(key, node)
        with model_known(recipe, classifier_tensors):
            part = instantiate(node, _convert_="all")
    except InterpolationKeyError as error:
        raise ConfigError(
            f"{key} refers to keys of a method that strategy={method_name(recipe)} does not have: "
            f"{one_line(str(error))}. (A part such as strategy/aggregator=maecho goes with "
            "strategy=maecho.)"
        ) from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set") from None
    except InstantiationException as error:
        raise _refused(key, error) from None
    # sums over sides must not depend on the order in which strategy=[...] names the methods
    return dict(sorted(part.items())) if isinstance(part, dict) else part


def require_classes(key: str, node: Any) -> None:
    """Refuse a ``_target_`` of a part that names no class or function."""
    if not isinstance(node, DictConfig):
        return
    for name, target in leaves(_plain(node, resolve=False)):
        if name.rpartition(".")[2] == "_target_" and target is not None:
            import_target(f"{key}.{name}", target)


def _refused(key: str, error: InstantiationException) -> Exception:
    """Return why the classes of a node cannot be built."""
    cause = error.__cause__
    if isinstance(cause, ValueError):  # ours: it names the key and what is allowed
        return cause
    if isinstance(cause, TypeError):
        return ConfigError(f"{key} cannot be built: {one_line(str(cause))}")
    return error


def check_loggers(loggers: DictConfig) -> None:
    """Refuse loggers that are not there, or do not take their arguments; none is built.

    Only the server has their packages, and some of them begin to write.
    """
    for name, node in _plain(loggers, resolve=True).items():
        found = import_target(f"logger.{name}._target_", node.pop("_target_"))
        try:
            signature(found).bind(**node)
        except TypeError as error:
            raise ConfigError(f"logger.{name} cannot be built: {error}") from None


def build_local_optimizer(recipe: DictConfig, classifier_tensors: int) -> Any:
    """Instantiate the local optimizer that ``local.optimizer`` names."""
    return build_part(recipe, f"local.optimizers.{recipe.local.optimizer}", classifier_tensors)


def plain_part(recipe: DictConfig, key: str) -> dict[str, Any]:
    """Return one part of the recipe as plain, resolved values."""
    return _plain(recipe[key], resolve=True)


def _plain(node: DictConfig, *, resolve: bool) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def resolved(recipe: DictConfig, classifier_tensors: int) -> dict[str, Any]:
    """Return the recipe with its references resolved, as plain values that may be shared.

    A value from the environment may be a secret: its reference ``${oc.env:NAME}`` stays.
    """
    with model_known(recipe, classifier_tensors):
        shared: Any = _escaped(OmegaConf.to_container(recipe))
    return _plain(OmegaConf.create(shared), resolve=True)


def config_yaml(recipe: DictConfig, classifier_tensors: int) -> str:
    """Return :func:`resolved` as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(resolved(recipe, classifier_tensors)))


def _escaped(node: Any) -> Any:
    """Return a part of a recipe in which references to the environment are plain text."""
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_escaped(value) for value in node]
    if isinstance(node, str) and "${oc.env:" in node:
        return node.replace("${", "\\${")
    return node


@contextmanager
def model_known(recipe: DictConfig, classifier_tensors: int) -> Iterator[None]:
    """Let recipes refer to ``${task.classifier_tensors}`` inside the block.

    It edits the recipe, since a copy takes 20 ms, and a run has a dozen parts.
    """
    with open_dict(recipe.task):
        recipe.task.classifier_tensors = classifier_tensors
        try:
            yield
        finally:
            del recipe.task.classifier_tensors


def fingerprint(recipe: DictConfig) -> dict[str, str]:
    """Return the hashes that server and clients compare: of the recipe and of the code."""
    code = _code_of(recipe)
    if code not in _code_hashes:
        _code_hashes[code] = code_hash(code)
    return {"recipe": _recipe_hash(recipe, (*SITE_KEYS, *NOTES)), "code": _code_hashes[code]}


_code_hashes: dict[tuple[Path, ...], str] = {}  # kept: a process imports its modules once


def _code_of(recipe: DictConfig) -> tuple[Path, ...]:
    """Return the packages and modules that a recipe's run depends on."""
    return (*(FOLDER.parent / package for package in PACKAGES), *own_code(recipe))


def resume_fingerprint(recipe: DictConfig) -> str:
    """Return the hash of all that a resumed run must share with the run it goes on with."""
    return _recipe_hash(recipe, (*SITE_KEYS, *NOTES, *LONGER))


def _recipe_hash(recipe: DictConfig, ignored: Sequence[str]) -> str:
    plain = _plain(recipe, resolve=False)
    shared = {key: value for key, value in plain.items() if key not in ignored}
    for part, name in (key.split(".") for key in FOLDER_KEYS):
        shared[part].pop(name, None)
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of what the numbers depend on."""
    return dict(_versions())


@cache  # a millisecond for each: a run and each of its workers asks several times
def _versions() -> Mapping[str, str]:
    found = {}
    for name in ("fedhet", "flwr", "torch", "torchvision", "numpy", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
