"""The installed Flower: its release and programs, and the app that `flwr run` takes."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import fedhet
from fedhet.common.results import FAILED
from fedhet.conf import FOLDER, PACKAGES

FLOWER = "1.39"
PROGRAMS = Path(sys.executable).parent

# The app is built from the installed packages, not from the clone: that works for every kind of
# install, and Flower does not search a folder with a whole environment in it.
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
serverapp = "fedhet.server_app.app:app"
clientapp = "fedhet.client_app.app:app"

[tool.flwr.app.config]
overrides = ""
"""


class LaunchError(RuntimeError):
    """A run could not be started, or did not complete; the message is for the user.

    ``status`` is what became of the run: failed, diverged or stopped.
    """

    def __init__(self, message: str, status: str = FAILED) -> None:
        super().__init__(message)
        self.status = status


def check_flower() -> None:
    """Raise LaunchError unless the installed Flower is of line 1.39."""
    installed = importlib.metadata.version("flwr")
    if installed.split(".")[:2] != FLOWER.split("."):
        raise LaunchError(
            f"flwr {installed} is installed, but this launcher needs {FLOWER}: install fedhet with "
            f"its own dependencies, or flwr=={FLOWER}.0"
        )


def flower_program(name: str) -> str:
    """Return the path of one of Flower's programs in this environment."""
    found = PROGRAMS / name
    if not found.exists():
        raise LaunchError(f"{found} is missing: `pip install -e .` installs it with Flower")
    return str(found)


def stage_app(folder: Path) -> Path:
    """Return the app as a folder below ``folder``; an existing one is reused."""
    app = folder / "fedhet"
    if app.exists():
        return app
    (app / "fedhet").mkdir(parents=True)
    version = importlib.metadata.version("fedhet")
    (app / "pyproject.toml").write_text(_APP.format(version=version))
    shutil.copy(fedhet.__file__, app / "fedhet")
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(FOLDER.parent / package, app / "fedhet" / package, ignore=leave_out)
    return app
