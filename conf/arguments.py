"""Checks the arguments of a recipe's classes (``_target_``) against their type hints.

A class's constructor checks the range; Python checks no type, so ``secret=maybe`` would be true.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra._internal.utils import _locate
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedhet.common.errors import ConfigError, did_you_mean, is_list
from fedhet.common.kinds import in_words
from fedhet.conf.mistakes import one_line

_REFERENCE = re.compile(r"\$\{([\w.]+\.\w+)\}")
_PLAIN = (bool, int, float, str, NoneType)


def check_arguments(node: Any, key: str) -> None:
    """Refuse arguments that a class of this node does not have, or of another type.

    Args:
        node: a part of the recipe, with references in it.
        key: of the node.

    Raises:
        ConfigError: that names the key, or the key that the argument refers to.
    """
    if isinstance(node, ListConfig):
        for number in range(len(node)):
            check_arguments(node[number], f"{key}[{number}]")
    if not isinstance(node, DictConfig):
        return
    if isinstance(target := node.get("_target_"), str):
        _check_class(node, target, key)
    for name in map(str, node):
        if OmegaConf.is_config(node._get_node(name)):
            check_arguments(node[name], f"{key}.{name}")


def _check_class(node: DictConfig, target: str, key: str) -> None:
    try:
        hints, open_ended = _parameters(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}._target_={target} cannot be imported: {one_line(str(error))}"
        ) from None
    for name in map(str, node):
        if name.startswith("_"):
            continue
        if name not in hints:
            if open_ended:
                continue
            near = did_you_mean(name, hints)
            raise ConfigError(
                f"unknown key {key}.{name}{near}; {target.rpartition('.')[2]} has: "
                f"{', '.join(hints) or 'none'}. (strategy=[METHOD,aggregator/OTHER] adds OTHER's "
                "keys to those of METHOD's own aggregator; strategy=METHOD "
                "strategy/aggregator=OTHER replaces it.)"
            )
        hint = hints[name]
        if is_plain(hint) and not fits(value := node[name], hint):
            raise ConfigError(
                f"{_source(node, name, key)}={_shown(value)} is not allowed: it must be "
                f"{in_words(hint)}"
            )


def _shown(value: Any) -> Any:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


@cache
def _parameters(target: str) -> tuple[Mapping[str, Any], bool]:
    """Return the parameters of a class by name with their hints, and whether it takes others."""
    made = _locate(target)
    if getattr(made, "__init__", None) is object.__init__:
        return {}, False
    call = made.__init__ if inspect.isclass(made) else made
    try:
        hints = get_type_hints(call)
    except (NameError, TypeError):  # names for type checkers alone
        hints = {}
    found, open_ended = {}, False
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            open_ended = True
        elif name != "self":
            found[name] = hints.get(name, Any)
    return found, open_ended


def is_plain(hint: Any) -> bool:
    """Return whether a hint is of values that a recipe can hold: numbers, text, lists of them."""
    return hint in _PLAIN or (
        get_origin(hint) is Literal
        or (get_origin(hint) in _CONTAINERS and all(map(is_plain, _members(hint))))
    )


_CONTAINERS = (Union, UnionType, list, tuple, Sequence)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a plain hint; a whole number is a number, true is neither."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin in _CONTAINERS:
        return is_list(value) and all(
            any(fits(one, member) for member in _members(hint)) for one in value
        )
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint)


def _members(hint: Any) -> Iterator[Any]:
    return (one for one in get_args(hint) if one is not Ellipsis)


def _source(node: DictConfig, name: str, key: str) -> str:
    """Return the key that a user sets: the argument's own, or the one that it refers to."""
    found: Any = node._get_node(name)
    while isinstance(text := found._value(), str) and (reference := _REFERENCE.fullmatch(text)):
        key, name = reference[1].rpartition(".")[::2]
        found = OmegaConf.select(node._get_root(), key)._get_node(name)
    return f"{key}.{name}"
