"""The installed Flower: its release and programs, and the app that `flwr run` takes."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import fedhet
from fedhet.common.errors import ConfigError
from fedhet.common.flower.line import installed_line
from fedhet.common.results import FAILED
from fedhet.conf import FOLDER, PACKAGES
from fedhet.conf.project import PAPERS, code_files, project

PROGRAMS = Path(sys.executable).parent

# The app is built from the installed packages, not from the clone: that works for every kind of
# install, and Flower does not search a folder that holds a whole environment.
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
_PROJECT = """
[tool.fedhet]
conf = "{conf}"
"""


class LaunchError(RuntimeError):
    """A run could not be started, or did not complete; the message is for the user.

    ``status`` says how the run ended: failed, diverged or stopped.
    """

    def __init__(self, message: str, status: str = FAILED) -> None:
        super().__init__(message)
        self.status = status


def check_flower() -> None:
    """Raise LaunchError if the installed Flower is older than fedhet's oldest."""
    try:
        installed_line()
    except ConfigError as error:
        raise LaunchError(str(error)) from error


def flower_program(name: str) -> str:
    """Return the path of one of Flower's programs in this environment."""
    found = PROGRAMS / name
    if not found.exists():
        raise LaunchError(f"{found} is missing: `pip install -e .` installs it with Flower")
    return str(found)


def stage_app(folder: Path, code: Sequence[Path] = ()) -> Path:
    """Return the app as a folder below ``folder``; an existing one is reused.

    ``code`` is the user's packages and modules. The app has them beside fedhet, and also the
    project's recipes, if there is a project.
    """
    app = folder / "fedhet"
    if app.exists():
        return app
    (app / "fedhet").mkdir(parents=True)
    found = project()
    text = _APP.format(version=importlib.metadata.version("fedhet"))
    text += _PROJECT.format(conf=found.conf) if found else ""
    (app / "pyproject.toml").write_text(text, encoding="utf-8")
    for file in ("__init__.py", "public_names.py"):
        shutil.copy(Path(fedhet.__file__).with_name(file), app / "fedhet")
    for package in PACKAGES:
        _copy(FOLDER.parent / package, app / "fedhet")
    for catalogue in FOLDER.glob("*.json"):
        shutil.copy(catalogue, app / "fedhet" / "conf")
    for papers in PAPERS:
        _copy(papers, app / "fedhet" / papers.parent.relative_to(FOLDER.parent))
    for path in code:
        _copy(path, app)
    return app


def _copy(path: Path, folder: Path) -> None:
    """Copy a package or a module into a folder."""
    for file in code_files(path):
        place = folder / file.relative_to(path.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
