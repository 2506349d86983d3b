"""ConfigError, and the checks that raise it; SetupError; DamagedFileError; DivergedError."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin


class ConfigError(ValueError):
    """An invalid configuration; the message names the key, its value and what is allowed."""


class SetupError(ConfigError):
    """Something that this machine lacks: a file, a folder, a package.

    The message contains no data, so a site may send it. For other errors that come from reading
    data, a site sends only the type.
    """


class DamagedFileError(ConfigError):
    """A file differs from what was written, or belongs to another run; the message names it."""


class UnreadableFileError(DamagedFileError):
    """The system cannot read a file now; its content may still be intact."""


class DivergedError(ArithmeticError):
    """The model or its loss is no longer finite; the message names the round and the value."""


_Choice = TypeVar("_Choice")


def require_choice(key: str, value: _Choice, allowed: Iterable[str]) -> _Choice:
    """Return ``value`` if it is one of ``allowed``; raise a ConfigError that lists them."""
    options = sorted(allowed)
    if value not in options:
        raise ConfigError(f"{key}={value!r} is unknown; allowed: {', '.join(options)}")
    return value


def require_range(
    key: str,
    value: float,
    *,
    low: float = 0.0,
    high: float = float("inf"),
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return ``value`` if it is a number in [low, high]; raise a ConfigError otherwise.

    Open bounds are not included.
    """
    inside = _is_of(value, float) and low <= value <= high
    if not inside or (open_low and value == low) or (open_high and value == high):
        span = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
        raise ConfigError(f"{key}={value} is not allowed: it must be a number in {span}")
    return value


def require_finite(key: str, value: float) -> float:
    """Return ``value`` if it is a finite number; raise a ConfigError otherwise."""
    return require_range(key, value, low=-math.inf, open_low=True, open_high=True)


def require_whole(key: str, value: int, *, low: int = 0) -> int:
    """Return ``value`` if it is a whole number >= ``low``; raise a ConfigError otherwise."""
    if not _is_of(value, int) or value < low:
        raise ConfigError(
            f"{key}={value} is not allowed: it must be a whole number of at least {low}"
        )
    return int(value)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return ": did you mean a or b?" for the nearest options, or "" if none is near."""
    near = get_close_matches(word, list(options), 3, 0.6)
    return f": did you mean {' or '.join(near)}?" if near else ""


def require_known_keys(group: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ConfigError that lists the known keys if there is an unknown one."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown key {', '.join(f'{group}.{key}' for key in unknown)}; "
            f"{group} has: {', '.join(sorted(known))}"
        )


def require_types(group: str, values: Mapping[str, object], kinds: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a value has the wrong type; YAML and the command line allow any.

    Args:
        group: the keys' group.
        values: the value of each key.
        kinds: the type of each key: ``int``, ``float``, ``bool``, ``str``, a ``tuple`` of one of
            them, or a union of these and ``None``.
    """
    for key, value in values.items():
        if not _is_of(value, kinds[key]):
            raise ConfigError(f"{group}.{key}={value!r} must be {_in_words(kinds[key])}")


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a list (OmegaConf's included) and not text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (in quotes if it looks like a number)",
    NoneType: "null",
}


def _is_of(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        member = get_args(kind)[0]
        return is_list(value) and all(_is_of(one, member) for one in value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):  # also numpy's numbers, but not true and false
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _in_words(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_in_words(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each of it {_in_words(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return _WORDS[kind]
