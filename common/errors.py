"""The one error for what cannot run as configured, and the checks that raise it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeGuard, TypeVar, get_args, get_origin


class ConfigError(ValueError):
    """What cannot run as configured; the message names the value, what is allowed, the key."""


_Choice = TypeVar("_Choice")


def require_choice(key: str, value: _Choice, allowed: Iterable[str]) -> _Choice:
    """Return ``value`` if it is one of ``allowed``.

    Raises:
        ConfigError: lists what is allowed.
    """
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
) -> float:
    """Return ``value`` if it is a number in [low, high], or in (low, high] with ``open_low``.

    Raises:
        ConfigError: names the range.
    """
    inside = _is_of(value, float) and (value > low if open_low else value >= low) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ConfigError(
            f"{key}={value} is not allowed: it must be a number in {bracket}{low}, {high}]"
        )
    return value


def require_whole(key: str, value: int, *, low: int = 0) -> int:
    """Return ``value`` if it is a whole number of at least ``low``.

    Raises:
        ConfigError: names the least value.
    """
    if not _is_of(value, int) or value < low:
        raise ConfigError(
            f"{key}={value} is not allowed: it must be a whole number of at least {low}"
        )
    return int(value)


def require_known_keys(group: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keys that nothing reads.

    Raises:
        ConfigError: lists the known keys.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown key {', '.join(f'{group}.{key}' for key in unknown)}; "
            f"{group} has: {', '.join(sorted(known))}"
        )


def require_types(group: str, values: Mapping[str, object], kinds: Mapping[str, Any]) -> None:
    """Refuse a value of another type than its key has: YAML and the command line have any.

    Args:
        group: what the keys stand under.
        values: what is given.
        kinds: the type of each key: ``int``, ``float``, ``bool``, ``str``, a ``tuple`` of one of
            them, or a union of these and ``None``.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    for key, value in values.items():
        if not _is_of(value, kinds[key]):
            raise ConfigError(f"{group}.{key}={value!r} must be {_in_words(kinds[key])}")


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a list of any kind, OmegaConf's included, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (in quotes, where it looks like a number)",
    NoneType: "null",
}


def _is_of(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        member = get_args(kind)[0]
        return is_list(value) and all(_is_of(one, member) for one in value)
    if kind in (int, float):  # numpy's numbers, too; true and false are none
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _in_words(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_in_words(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each of it {_in_words(get_args(kind)[0])}"
    return _WORDS[kind]
