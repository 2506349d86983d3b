"""Decides whether loading a results folder may import what its recipe names.

A recipe names functions and classes, and loading its run calls them with the recipe's values: a
folder from somebody else would run code here. So a recipe may name fedhet's own methods, models
and data, a few libraries, the project's code, and other code of the user's that is the same, by
its hash, as the code that made the run. Everything else needs the user's word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedhet.common.errors import ConfigError
from fedhet.common.outside import home_of, import_name, import_target, is_name, is_standard
from fedhet.common.results import CONFIG
from fedhet.conf import fingerprint
from fedhet.conf.project import own_code, project

# Their functions open no file of the recipe's choice; torch.load and torch.hub would.
LIBRARIES = ("torch.nn", "torchvision.models", "torchmetrics", "sklearn.metrics")
_TASKS = (
    "heart_disease",
    "hugging_face",
    "instructions",
    "segmentation",
    "synthetic",
    "tabular",
    "transformer",
)
_KNOWN = (*LIBRARIES, *(f"fedhet.tasks.{name}" for name in _TASKS))
_NOT_IMPORTED = ("paper", "choice", "logger", "runtime")  # by loading a run
_RESOLVER = re.compile(r"\$\{\s*([^\s${}:]+)\s*:")
_trusted: set[Path] = set()


def trust(folder: Path) -> None:
    """Let this process import whatever the recipe of a results folder names."""
    _trusted.add(folder.resolve())


def require_trust(folder: Path, recipe: DictConfig, summary: Mapping[str, Any], cure: str) -> None:
    """Refuse a run whose recipe names code that nobody vouches for.

    Args:
        folder: of the run.
        recipe: from its config.yaml.
        summary: its summary.json; empty without one.
        cure: what the user can do, for the error.

    Raises:
        ConfigError: that names the key and its value.
    """
    if folder.resolve() in _trusted:
        return
    named = [*_names(_as_read(recipe, OmegaConf.to_container(recipe)))]
    known = {*_KNOWN, *_own_packages(recipe, summary, named)}
    for key, text in named:
        if not _is_known(key, text, known):
            raise ConfigError(
                f"{folder / CONFIG}: {key}={text}: loading this run would import and call code "
                "that is neither fedhet's nor your project's, and no hash says that it is the code "
                f"that made the run: {cure}"
            )


def _as_read(recipe: DictConfig, node: Any) -> Any:
    """Return a part of a recipe as plain values, as far as its references can be resolved here.

    A run writes a reference to the environment only: with others, a value could change after this.
    """
    if isinstance(node, dict):
        return {key: _as_read(recipe, value) for key, value in node.items()}
    if isinstance(node, list):
        return [_as_read(recipe, value) for value in node]
    if not (isinstance(node, str) and "${" in node):
        return node
    if "oc.env:" not in node or {*_RESOLVER.findall(node)} - {"oc.env", "oc.decode"}:
        raise ConfigError(f"the recipe of a run has {node}, which no run writes")
    try:
        return OmegaConf.select(OmegaConf.merge(recipe, {"_it": node}), "_it")
    except OmegaConfBaseException:  # no such variable: what reads the value fails, too
        return node


def _own_packages(
    recipe: DictConfig, summary: Mapping[str, Any], named: Collection[tuple[str, str]]
) -> list[str]:
    """Return the user's top packages and modules that the recipe may name."""
    found = project()
    packages = [] if found is None else [found.code.stem]
    code = summary.get("fingerprint", {}).get("code")
    if named and code is not None and fingerprint(recipe)["code"] == code:
        packages += [path.stem for path in own_code(recipe)]
    return packages


def _is_known(key: str, text: str, known: Collection[str]) -> bool:
    """Return whether a name may be imported without the user's word.

    What it stands for counts, too: a module also holds what it has imported.
    """
    is_class = ":" not in text
    module = text.rpartition(".")[0] if is_class else text.partition(":")[0]
    ours = module.startswith("fedhet.strategies.")
    if not (ours or is_standard(module) or _is_within(module, known)):
        return False
    found = import_target(key, text) if is_class else import_name(key, text)  # refuses a standard
    if isinstance(found, type) and ours:
        return home_of(found).startswith("fedhet.strategies.")
    return _is_within(home_of(found), known)


def _is_within(module: str, known: Collection[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in known)


def _names(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the functions and classes that a part of a recipe names, each with its key."""
    if isinstance(node, dict):
        for name, value in node.items():
            if key or name not in _NOT_IMPORTED:
                yield from _names(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _names(value, key)
    elif isinstance(node, str) and (key.endswith("._target_") or is_name(node)):
        yield key, node
