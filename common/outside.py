"""Imports what a recipe names outside fedhet; nothing else in the project does.

A recipe names a function or a class, ``package.module:name``, or a class that Hydra builds,
``_target_: package.module.Class``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedhet.common.errors import ConfigError, SetupError

_NAME = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.<>]*")
INSTALLED = {"site-packages", "dist-packages"}
_WITH_SIGNALS = ("fedhet", "flwr", "ray")  # whose handlers end a process by SystemExit
_SHOWN = 200  # characters of a message that is not ours


def is_name(text: str) -> bool:
    """Return whether a text names a function or a class, ``package.module:name``."""
    return _NAME.fullmatch(text) is not None


def import_name(key: str, text: str) -> Any:
    """Return what ``package.module:name`` stands for.

    Args:
        key: of the recipe, for errors.
        text: its value.

    Raises:
        ConfigError: if it does not exist, its module cannot be imported, or it belongs to Python's
            standard library.
    """
    if not is_name(text):
        raise ConfigError(f"{key}={text} is not allowed: it must be package.module:name")
    module, _, name = text.partition(":")
    return _found(key, text, module, name)


def import_target(key: str, text: object) -> Any:
    """Return what ``package.module.Class`` stands for; see :func:`import_name`."""
    parts = text.split(".") if isinstance(text, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key}={text} is not allowed: it must be package.module.Class")
    for end in range(len(parts) - 1, 1, -1):  # a class may be inside another one
        if _is_module(".".join(parts[:end])):
            return _found(key, str(text), ".".join(parts[:end]), ".".join(parts[end:]))
    return _found(key, str(text), parts[0], ".".join(parts[1:]))


def home_of(found: Any) -> str:
    """Return the module that defines a function or a class; of another object, its class's."""
    owner = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
    return str(getattr(owner, "__module__", None) or type(owner).__module__)


@contextmanager
def no_exit(start: str) -> Iterator[None]:
    """Turn a SystemExit of the user's function into a ConfigError that begins with ``start``.

    The SystemExit that a signal raises is not the function's, wherever it comes, and passes.
    """
    try:
        yield
    except SystemExit as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _WITH_SIGNALS:
            raise
        raise ConfigError(
            f"{start} ends the process with SystemExit({error.code!r}) ({place_of(error)}): raise "
            "another error, or return"
        ) from error


def is_standard(module: str) -> bool:
    """Return whether a module belongs to Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # of a package on the way, whose import says it
        return False


def _found(key: str, text: str, module: str, name: str) -> Any:
    _refuse_standard(key, text, module)
    found = _imported(key, text, module)
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            hint = f"; it has {', '.join(near)}" if near else ""
            raise ConfigError(f"{key}={text}: {module} has no {part}{hint}")
        found = getattr(found, part)
    if inspect.isclass(found) or inspect.isroutine(found):
        _refuse_standard(key, text, home_of(found))
    return found


def _refuse_standard(key: str, text: str, module: str) -> None:
    if is_standard(module):
        raise ConfigError(
            f"{key}={text} is not allowed: {module} belongs to Python's standard library, which "
            "has no models, data or methods"
        )


def _imported(key: str, text: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise SetupError(f"{key}={text}: {_where_looked(error.name)}") from None
        raise SetupError(
            f"{key}={text}: the module {module} needs {error.name}, which is not installed "
            f"({place_of(error)})"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={text}: importing {module} failed: {said_by(error)}") from error


def _where_looked(module: str) -> str:
    """Say that a module does not exist, and where fedhet has looked."""
    package = sys.modules.get(module.rpartition(".")[0])
    if package is not None:  # possibly an installed package with the user's name
        return f"there is no module {module} in {', '.join(package.__path__)}"
    return (
        f"there is no module {module} in the current folder, in the app bundle or among the "
        "installed packages"
    )


def said_by(error: BaseException) -> str:
    """Return an error of the user's code in one line: its type, its text, file and line."""
    text = shorten(" ".join(str(error).split()), _SHOWN, placeholder=" ...")
    return f"{type(error).__name__}{f': {text}' if text else ''} ({place_of(error)})"


def place_of(error: BaseException) -> str:
    """Return file and line of an error, in the user's own files if one is involved."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _is_own(file: Path) -> bool:
    ours = Path(__file__).parent
    library = Path(sysconfig.get_paths()["stdlib"])
    others = INSTALLED & set(file.parts) or file.parent == ours or library in file.parents
    return file.is_absolute() and not others
