"""`fedhet --help`: the methods, the groups, and a table of the recipe's keys, from the schema."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedhet.commands import table_console
from fedhet.common.configured import shown
from fedhet.common.errors import ConfigError, did_you_mean
from fedhet.common.kinds import short_words
from fedhet.common.nested import leaves
from fedhet.conf import compose_overrides
from fedhet.conf.catalogue import METHODS, CatalogueEntry, method_of, options
from fedhet.conf.mistakes import groups, method_lines, options_of, value_at
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import fields_of, keys_below, tags_of

_OWN_FLAGS = ("--resume", "--help")
_HEAD = """fedhet KEY=VALUE ...     runs a recipe: fedhet strategy=scaffold task=mnist rounds=50
fedhet -m KEY=A,B ...    runs a sweep; fedhet -m --resume FOLDER continues one (docs/sweeps.md)
fedhet KEY=VALUE --help  shows that recipe's keys; fedhet --hydra-help shows Hydra's flags

Methods, strategy=NAME (strategy=[a,b] combines two):"""
_GROUPS = """
Other groups, GROUP=OPTION:"""


def check_flags(words: Sequence[str]) -> None:
    """Reject a flag that neither fedhet nor Hydra has, and name the nearest one."""
    _take_help_texts_unread()
    known = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and not any(one.startswith(flag) for one in known):
            key, _, value = word.removeprefix("--").partition("=")
            if (name := key.replace("-", "_")).partition(".")[0] in (*fields_of(Recipe), *groups()):
                raise ConfigError(f"unknown option {flag}: write {name}={value or 'VALUE'}")
            near = did_you_mean(flag, [*known, *_OWN_FLAGS])
            raise ConfigError(f"unknown option {flag}{near}; fedhet --hydra-help lists Hydra's")


def _take_help_texts_unread() -> None:
    """Let Hydra give argparse a help text that is made only when it is shown.

    argparse of Python 3.14 reads each text at once, and Hydra up to 1.3.8 would fail there.
    """
    if hasattr(argparse.ArgumentParser, "_check_help"):
        argparse.ArgumentParser._check_help = lambda parser, action: None


def print_help(words: Sequence[str]) -> None:
    """Print methods and groups, and the keys of the recipe that the words stand for."""
    console = table_console()
    if console.is_terminal:
        return _print_help(words, console)
    with console.capture() as printed:
        _print_help(words, console)
    # rich pads a table's rows to the width of the table
    console.out("\n".join(line.rstrip() for line in printed.get().splitlines()), highlight=False)
    return None


def _print_help(words: Sequence[str], console: Console) -> None:
    overrides = tuple(word for word in words if "=" in word and not word.startswith("-"))
    recipe = compose_overrides(overrides)
    values: Any = OmegaConf.to_container(recipe)
    console.print(_HEAD, highlight=False, markup=False)
    methods = Table.grid(padding=(0, 2))
    for name, comment in method_lines().items():
        said = comment.partition(": ")[2] or comment  # `Name (Authors Year): what it is.`
        purpose = Text(said, no_wrap=True, overflow="ellipsis")
        methods.add_row(Text(f"  {name}", style="bold"), purpose)
    console.print(methods)
    console.print(_GROUPS, highlight=False, markup=False)
    for group in groups():
        if group != "strategy" and not group.startswith("experiment"):
            line = Text(f"  {group}: ", style="bold")
            line.append(", ".join(options_of(group)), style="not bold")
            console.print(line)
    table = Table(
        "key", "value", "allowed", "meaning", box=None, header_style="bold", pad_edge=False
    )
    for row in _rows(values):
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)


def _rows(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, what is allowed, and the meaning."""
    for key in keys_below(Recipe, (), tags_of(values)):
        assert key.field is not None
        value = value_at(values, key.path)
        text = "..." if isinstance(value, dict) and value else shown(value)
        yield key.name, text, short_words(key.allowed), key.field.description or ""
        if option := _option("/".join(key.path), value):
            yield from _own_rows(option, values)
    for path in values[METHODS]["methods"].values():
        yield from _own_rows(method_of(path), values)


def _own_rows(
    entry: CatalogueEntry, values: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of a method's or an option's own keys."""
    for name, key in entry["keys"].items():
        yield name, shown(value_at(values, name.split("."))), key["allowed"], key["meaning"]


def _option(group: str, node: Any) -> CatalogueEntry | None:
    """Return the option of a group that builds a node's classes."""
    known = options().get(group, {}).values()
    return next((one for one in known if _classes(one["node"]) == _classes(node)), None)


def _classes(node: Any) -> list[tuple[str, Any]]:
    """Return the classes that a node builds, by key."""
    keys = leaves(node) if isinstance(node, Mapping) else ()
    return [(key, value) for key, value in keys if key.rpartition(".")[2] == "_target_"]
