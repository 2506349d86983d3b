"""Keys of the swept methods: `fedhet -m strategy=mofedsam,fedmrur strategy.sam.rho=0.02`.

Hydra composes a sweep once without the swept words, so it knows no key that only swept methods
have. It leaves swept values alone in that composition; so such a key is handed to it as a sweep
with a single value, and every job gets that value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import OverrideParseException

from fedhet.common.errors import ConfigError
from fedhet.conf.catalogue import is_own, method_of
from fedhet.conf.mistakes import options_with

_MULTIRUN = ("-m", "--multirun")
_GROUPS = ("strategy", "partition", "runtime")
_LISTS = (ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP)


def with_single_sweeps(words: Sequence[str]) -> list[str]:
    """Return the command line with the keys of swept options as sweeps of one value.

    Raises:
        ConfigError: for a key that only some of the swept options have.
    """
    if not any(word in _MULTIRUN for word in words):
        return list(words)
    parser = OverridesParser.create()
    swept: dict[str, list[str]] = {}
    for word in words:
        group = word.partition("=")[0]
        override = _parsed(parser, word) if group in _GROUPS else None
        if override is not None and override.value_type in _LISTS:
            options = map(str, override.sweep_iterator())
            swept[group] = [one.replace(" ", "").replace("'", "") for one in options]
    return [_as_sweep(word, swept, parser) for word in words]


def _as_sweep(word: str, swept: Mapping[str, Sequence[str]], parser: OverridesParser) -> str:
    key, equals, value = word.partition("=")
    options = swept.get(key.partition(".")[0], ()) if "." in key and equals else ()
    having = [*options_with(key), *_own_methods_with(key, options)] if options else []
    if not having:
        return word
    lacking = [one for one in options if not set(one.strip("[]").split(",")) & set(having)]
    if lacking:
        raise ConfigError(
            f"{key}={value}: {key.partition('.')[0]}={lacking[0]} of this sweep has no such key; "
            f"these have it: {', '.join(having)}. Sweep over those alone"
        )
    override = _parsed(parser, word)
    is_single = override is not None and not override.is_sweep_override()
    return f"{key}=choice({value})" if is_single else word


def _own_methods_with(key: str, options: Sequence[str]) -> list[str]:
    """Return the methods of the user's own among swept options that have a key."""
    names = {name for option in options for name in option.strip("[]").split(",")}
    return [name for name in sorted(names) if is_own(name) and key in method_of(name)["keys"]]


def is_single(override: Override) -> bool:
    """Return whether an override is a sweep of one value."""
    values: Any = override.value()
    return len(getattr(values, "list", ())) == 1


def _parsed(parser: OverridesParser, word: str) -> Override | None:
    try:
        return parser.parse_override(word)
    except OverrideParseException:  # Hydra says so
        return None
