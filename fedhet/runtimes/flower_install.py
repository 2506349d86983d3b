"""Flower as it is installed here: its release, its programs, and the app that is handed to it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path

from conf import PACKAGES

FLOWER = "1.39"
PROGRAMS = Path(sys.executable).parent

# The app as `flwr run` takes it. Built from the installed packages, not from the clone, it works
# for every kind of install, and spares Flower the search of a folder with a whole environment in it
# (3.5 s).
_APP = """\
[project]
name = "fedhet"
version = "{version}"
description = "fedhet, as installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedhet"

[tool.flwr.app.components]
serverapp = "server_app.app:app"
clientapp = "client_app.app:app"

[tool.flwr.app.config]
overrides = ""
"""


class LaunchError(RuntimeError):
    """A run that could not be started, or that failed; the message is for the user."""


def check_flower() -> None:
    """Refuse to start with a Flower that this launcher is not written for.

    Raises:
        LaunchError: if another line than 1.39 is installed.
    """
    installed = importlib.metadata.version("flwr")
    if installed.split(".")[:2] != FLOWER.split("."):
        raise LaunchError(
            f"flwr {installed} is installed, and this launcher is written for {FLOWER}: install "
            f"fedhet with its own dependencies, or flwr=={FLOWER}.0"
        )


def flower_program(name: str) -> str:
    """Return the path of one of Flower's programs, of this environment.

    Raises:
        LaunchError: if it is not there.
    """
    found = PROGRAMS / name
    if not found.exists():
        raise LaunchError(f"{found} is missing: `pip install -e .` installs it with Flower")
    return str(found)


def stage_app(folder: Path) -> Path:
    """Return the app as a folder below ``folder``; an earlier run's is used again.

    Raises:
        LaunchError: if a package of fedhet is not installed.
    """
    app = folder / "fedhet"
    if app.exists():
        return app
    app.mkdir()
    version = importlib.metadata.version("fedhet")
    (app / "pyproject.toml").write_text(_APP.format(version=version))
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise LaunchError(f"the package {package} is not installed: run `pip install -e .`")
        source = found.submodule_search_locations[0]
        shutil.copytree(source, app / package, ignore=shutil.ignore_patterns("__pycache__"))
    return app
