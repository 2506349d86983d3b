"""Functions of the user's own package, named in a recipe as ``package.module:function``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError

Function = Callable[..., Any]
_BRACKETS = {ord("<"): None, ord(">"): None}


def is_reference(text: str) -> bool:
    """Return whether a recipe's value names a function, not one of fedhet's options."""
    return ":" in text


def load_reference(key: str, text: str) -> Function:
    """Return the function that a recipe's ``key`` names.

    Raises:
        ConfigError: if there is no such module or function. An error inside the module is raised
            unchanged.
    """
    path, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}={text}: the module {path} needs {error.name}, which is not installed"
            ) from error
        raise ConfigError(f"{key}={text}: {_where_looked(error.name)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, vars(found), n=3)
            hint = f"; it has {', '.join(near)}" if near else ""
            raise ConfigError(f"{key}={text}: {path} has no {part}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}={text} is a {type(found).__name__}, not a function")
    function: Function = found
    return function


def _where_looked(module: str) -> str:
    """Say that there is no such module, and where fedhet has looked."""
    package = sys.modules.get(module.rpartition(".")[0])
    if package is not None:  # possibly an installed package with the user's name
        return f"there is no module {module} in {', '.join(package.__path__)}"
    return (
        f"there is no module {module} in the current folder, in the app bundle or among the "
        "installed packages"
    )


def name_of(function: Function) -> str:
    """Return how a recipe names a function, ``package.module:function``.

    A function inside another one (``<locals>``), or a lambda, has a name that cannot be loaded. A
    ``functools.partial`` has its function's name and a hash of its arguments, also not loadable.
    """
    if isinstance(function, partial):
        given = [*map(_said, function.args)]
        given += [f"{name}={_said(value)}" for name, value in sorted(function.keywords.items())]
        digest = hashlib.sha256(", ".join(given).encode()).hexdigest()[:8]
        return f"{name_of(function.func)}.partial_{digest}"
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}".translate(_BRACKETS)


def _said(value: Any) -> str:
    """Return an argument as text that is the same in every process."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_said, value))}]"
    if isinstance(value, Mapping):
        items = sorted(f"{key}: {_said(one)}" for key, one in value.items())
        return f"{{{', '.join(items)}}}"
    if value is None or isinstance(value, (bool, int, float, str, bytes, Path)):
        return repr(value)
    return name_of(value) if callable(value) else type(value).__qualname__


def call_with_known(
    key: str,
    function: Function,
    known: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    options_key: str | None = None,
    names: Iterable[str] = (),
) -> Any:
    """Call a user's function with those of the known values that its parameters name.

    Args:
        key: the recipe's key, for errors.
        function: the user's function.
        known: values that fedhet can pass, by parameter name.
        options: the recipe's values for further parameters; they override known values.
        options_key: the recipe's key of these, for errors; None: ``key`` and "_options".
        names: further parameters that a function may have, for errors.

    Raises:
        ConfigError: if a parameter without default has no value, or the function does not take an
            option.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a builtin
        return function(**options)
    kinds = {one.kind for one in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    options_key = options_key or f"{key}_options"
    unknown = [] if takes_any else sorted(set(options) - set(parameters))
    if unknown:
        raise ConfigError(
            f"{options_key} has {', '.join(unknown)}, but {name_of(function)} takes: "
            f"{', '.join(parameters) or 'nothing'}"
        )
    given = {name: known[name] for name in parameters if name in known} | dict(options)
    missing = [
        name
        for name, one in parameters.items()
        if one.default is one.empty
        and name not in given
        and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if missing:
        others = ", ".join(sorted({*known, *names}))
        raise ConfigError(
            f"{key}={name_of(function)} needs {', '.join(missing)}: give them in {options_key}"
            + (f", or name the parameter one of {others}" if others else "")
        )
    return function(**given)
