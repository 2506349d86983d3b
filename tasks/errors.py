"""The error for a recipe or a data folder that cannot work."""

from __future__ import annotations

from collections.abc import Iterable


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
