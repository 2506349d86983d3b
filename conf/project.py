"""The user's own code and recipes: where they are, and what of them travels with a run.

A project is a folder whose pyproject.toml says ``[tool.fedhet] conf = "my_project/conf"``. The
recipes below that folder are composed as if they were in fedhet's conf/. The first project on
Python's path counts: on the command line that is the current folder, in Flower's processes the app
bundle. Functions and classes need no project: a recipe names them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from fedhet.common.errors import ConfigError
from fedhet.common.outside import INSTALLED, is_name, is_standard
from fedhet.conf.catalogue import METHODS, methods, options
from fedhet.conf.catalogue_source import CatalogueSource
from fedhet.conf.kept_files import keep_files_of

FOLDER = Path(__file__).resolve().parent
# The papers' experiments stand beside conf/ in a clone, a wheel and an app bundle.
PAPERS = tuple(sorted(FOLDER.parent.glob("reproductions/*/conf")))
_TABLE = "[tool.fedhet]"
_CODE = (".py", ".yaml")


@dataclass(frozen=True)
class Project:
    """A project's folder, and the folder of its recipes, relative to it."""

    folder: Path
    conf: str

    @property
    def recipes(self) -> Path:
        """The folder of the recipes."""
        return self.folder / self.conf

    @property
    def code(self) -> Path:
        """The package, or the folder, at the top of the project that has the recipes."""
        return self.folder / Path(self.conf).parts[0]


def project() -> Project | None:
    """Return the project whose code Python finds first, if there is one.

    Raises:
        ConfigError: if its pyproject.toml is wrong, or a recipe is not UTF-8, or has the name of
            one of fedhet's.
    """
    return _first_project(tuple(map(os.path.abspath, sys.path)))


@cache
def _first_project(path: tuple[str, ...]) -> Project | None:
    found = (_read(Path(folder, "pyproject.toml")) for folder in path)
    return next((one for one in found if one is not None), None)


def _read(path: Path) -> Project | None:
    content = path.read_bytes() if path.is_file() else b""
    if _TABLE.encode() not in content:
        return None
    try:
        table = tomllib.loads(_text(path, content))["tool"]["fedhet"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if unknown := sorted(set(table) - {"conf"}):
        raise ConfigError(f"{path}: {_TABLE} has {unknown[0]}; allowed: conf")
    found = Project(path.parent, str(table.get("conf", "")))
    below = path.parent.resolve() in found.recipes.resolve().parents
    if not below or not found.recipes.is_dir():
        raise ConfigError(
            f"{path}: {_TABLE} conf={found.conf!r} must be a folder below {path.parent}"
        )
    for recipe in sorted(found.recipes.rglob("*.yaml")):
        name = recipe.relative_to(found.recipes)
        known = any((folder / name).exists() for folder in (FOLDER, *PAPERS))
        if known or _in_catalogue(name):
            raise ConfigError(f"{recipe}: fedhet has a recipe {name}, too; rename yours")
        _text(recipe, recipe.read_bytes())
    return found


def _in_catalogue(recipe: Path) -> bool:
    """Return whether a recipe file has the name of a method or an option of fedhet's."""
    group = recipe.parent.as_posix()
    return recipe.stem in (methods() if group == METHODS else options().get(group, ()))


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} is not UTF-8 (line {line}): save it in that encoding") from None


def where_looked(*, only_above: bool = False) -> str:
    """Return where a project was looked for, and the nearest folder above that is one.

    Empty if there is a project, and with ``only_above`` if no folder above is one. The one above is
    only named, and nothing of it is imported or composed: in a shared folder it may be somebody
    else's, and which modules a run finds and takes along would depend on where it was started.
    """
    if project() is not None:
        return ""
    here = Path.cwd()
    looked = f"no project is in {here} (no pyproject.toml with {_TABLE})"
    above = next((one for one in here.parents if _is_project(one)), None)
    if above is not None:
        return f"{looked}; one is in {above}: start there"
    return "" if only_above else looked


def _is_project(folder: Path) -> bool:
    try:
        return _TABLE.encode() in (folder / "pyproject.toml").read_bytes()
    except OSError:
        return False


def conf_folders() -> tuple[Path, ...]:
    """Return the folders that recipes are composed from: fedhet's, the papers', the project's."""
    found = project()
    return (FOLDER, *PAPERS, *([found.recipes] if found else []))


class _Recipes(SearchPathPlugin):
    """Lets Hydra find the catalogue (conf/catalogue_source.py) and recipes outside conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the catalogue and the folders of the papers and of the project."""
        search_path.append("fedhet", "catalogue://")
        for folder in conf_folders()[1:]:
            search_path.append("fedhet", f"file://{folder}")


def register_recipes() -> None:
    """Let Hydra find all recipes, in this process."""
    Plugins.instance().register(CatalogueSource)
    Plugins.instance().register(_Recipes)
    ours = [f"file://{folder}" for folder in (FOLDER, *PAPERS)]
    keep_files_of("pkg://hydra.conf", "pkg://fedhet.conf", *ours)


# ------------------------------------------------------------------------------------------- code
def find_modules_in(folder: str) -> None:
    """Let this process import modules of a folder, too, after those that it finds already.

    PYTHONPATH would come before Python's own modules, and a ``datasets.py`` of the user's would
    break Flower and Ray.
    """
    if folder not in sys.path:
        sys.path.append(folder)


def own_code(recipe: DictConfig) -> tuple[Path, ...]:
    """Return the user's packages (folders) and modules (files) that a recipe names.

    They are at the top of Python's path. Neither fedhet's nor installed ones are among them.
    """
    plain = OmegaConf.to_container(recipe)
    found = map(_source, sorted(set(_modules(plain))))
    return tuple(path for path in found if path is not None)


def travelling_code(recipe: DictConfig) -> tuple[Path, ...]:
    """Return what a run of a recipe takes along: the code that it names, the project's recipes."""
    found = project()
    return tuple(dict.fromkeys([*own_code(recipe), *([found.code] if found else [])]))


def code_files(path: Path) -> Iterator[Path]:
    """Yield the files of a package, or of a module, that travel and are hashed, in order.

    Flower's bundles have no tests, so they are left out.
    """
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        name = file.stem
        is_test = name.startswith("test_") or name.endswith("_test")
        if file.suffix in _CODE and not is_test and file.is_file():
            yield file


def code_hash(paths: Iterable[Path]) -> str:
    """Return a hash of packages and modules: the same bytes, wherever they are."""
    digest = hashlib.sha256()
    for path in paths:
        for file in code_files(path):
            digest.update(file.relative_to(path.parent).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _modules(node: Any) -> Iterator[str]:
    """Yield the first part of every module that a part of a recipe names."""
    if isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            yield target.partition(".")[0]
        for value in node.values():
            yield from _modules(value)
    elif isinstance(node, list):
        for value in node:
            yield from _modules(value)
    elif isinstance(node, str) and is_name(node):
        yield node.partition(":")[0].partition(".")[0]


def _source(name: str) -> Path | None:
    """Return the folder or file of the user's module with this name."""
    if is_standard(name) or name == "fedhet":
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # of __main__
        return None
    places = spec and [*(spec.submodule_search_locations or [spec.origin or ""])]
    path = Path(places[0]) if places else Path()
    is_own = (path.is_dir() or path.suffix == ".py") and not INSTALLED & set(path.parts)
    return path if path.name and is_own else None
