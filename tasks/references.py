"""Functions of the user's own package, named in a recipe as ``package.module:function``."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError
from fedhet.common.outside import home_of, import_name, no_exit

Function = Callable[..., Any]
_BRACKETS = {ord("<"): None, ord(">"): None}


def is_reference(text: str) -> bool:
    """Return whether a recipe's value names a function, not one of fedhet's options."""
    return ":" in text


def load_reference(key: str, text: str) -> Function:
    """Return the function that a recipe's ``key`` names.

    Raises:
        ConfigError: if there is no such function, or its module cannot be imported.
    """
    found = import_name(key, text)
    if not callable(found):
        raise ConfigError(f"{key}={text} is a {type(found).__name__}, not a function")
    function: Function = found
    return function


def require_pair(start: str, function: Function, returned: str) -> None:
    """Refuse a function that can't be called with (outputs, targets); ``start`` begins the error.

    Raises:
        ConfigError: if it takes fewer arguments, or needs more.
    """
    try:
        inspect.signature(function).bind("outputs", "targets")
    except TypeError as error:
        raise ConfigError(f"{start} (outputs, targets) -> {returned}: {error}") from None
    except ValueError:  # a builtin has no signature
        pass


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


def _is_torchvision(function: Function) -> bool:
    """Whether a function builds a model for ``num_classes`` though its signature hides that."""
    return home_of(function).startswith("torchvision.models.")


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
        with no_exit(f"{key}={name_of(function)}"):
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
    if takes_any and _is_torchvision(function) and "num_classes" in known:
        given = given if given.get("weights") else {"num_classes": known["num_classes"], **given}
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
    with no_exit(f"{key}={name_of(function)}"):
        return function(**given)
