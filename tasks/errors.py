"""The error for a recipe or a data folder that cannot work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeGuard, get_args, get_origin


class ConfigError(ValueError):
    """What cannot run as configured; the message names the value, what is allowed, the key."""


def require_option(key: str, value: object, options: Iterable[str]) -> None:
    """Refuse a name that is not one of the options.

    Raises:
        ConfigError: lists the options.
    """
    allowed = sorted(options)
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is unknown; allowed: {', '.join(allowed)}")


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
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(
            value, bool
        )
    return isinstance(value, kind)


def _in_words(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_in_words(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each of it {_in_words(get_args(kind)[0])}"
    return _WORDS[kind]
