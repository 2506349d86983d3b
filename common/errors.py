"""ConfigError, and the checks that raise it; SetupError; DamagedFileError; DivergedError."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TypeGuard, TypeVar


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
    inside = _is_number(value, Real) and low <= value <= high
    if not inside or (open_low and value == low) or (open_high and value == high):
        span = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
        raise ConfigError(f"{key}={value} is not allowed: it must be a number in {span}")
    return value


def require_finite(key: str, value: float) -> float:
    """Return ``value`` if it is a finite number; raise a ConfigError otherwise."""
    return require_range(key, value, low=-math.inf, open_low=True, open_high=True)


def require_whole(key: str, value: int, *, low: int = 0) -> int:
    """Return ``value`` if it is a whole number >= ``low``; raise a ConfigError otherwise."""
    if not _is_number(value, Integral) or value < low:
        raise ConfigError(
            f"{key}={value} is not allowed: it must be a whole number of at least {low}"
        )
    return int(value)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return ": did you mean a or b?" for the nearest options, or "" if none is near."""
    near = get_close_matches(word, list(options), 3, 0.6)
    return f": did you mean {' or '.join(near)}?" if near else ""


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a list (OmegaConf's included) and not text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: object, kind: type) -> bool:
    """Return whether a value is a number, NumPy's included; true and false are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
