"""The catalogue of methods: what their classes say, in one generated file.

Composing a recipe, ``--help`` and completion need the methods' keys, defaults and meanings, and
must not wait for PyTorch. ``methods.json`` has what :func:`entry_of` makes of the classes
(``make docs`` writes it, and a test compares them); a method of the user's own is imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypedDict

from pydantic import TypeAdapter

from fedhet.common.configured import Configured, Field, fields, section_of
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import in_words, short_words
from fedhet.conf.project import FOLDER

FILE = FOLDER / "methods.json"
GROUP = "strategy"
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Option(TypedDict):
    """A key of a method."""

    default: Any  # as a recipe has it
    allowed: str  # in words
    meaning: str
    schema: dict[str, Any]  # JSON schema


class Entry(TypedDict):
    """What a recipe takes from a method's class.

    ``node`` is what the method's recipe has, and ``groups`` the options that it chooses of other
    groups; ``requires`` are keys and the only value that they may have.
    """

    path: str  # module:class
    name: str
    summary: str
    replaces: list[str]
    requires: dict[str, Any]
    groups: dict[str, str]
    node: dict[str, Any]
    options: dict[str, Option]  # by key


@cache
def catalogue() -> Mapping[str, Entry]:
    """Return fedhet's methods by name."""
    found: dict[str, Entry] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def is_own(name: str) -> bool:
    """Return whether a method is named by its class, ``package.module:Class``."""
    return _OWN.fullmatch(name) is not None


@cache
def entry(name: str) -> Entry:
    """Return a method's entry, by its name or by its class, ``package.module:Class``.

    Raises:
        ConfigError: if there is no such class, or it is no method.
    """
    known = catalogue()
    if name in known:
        return known[name]
    for one in known.values():
        if one["path"] == name:
            return one
    return entry_of(load(name))


def load(path: str) -> type[Any]:
    """Import a method's class.

    Raises:
        ConfigError: if there is none.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"strategy={path} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Configured) and hasattr(found, "parts")):
        raise ConfigError(
            f"strategy={path} is no method: it must be a subclass of fedhet.Method (docs/own.md)"
        )
    return found


# ------------------------------------------------------------------------------- from the classes
def entry_of(kind: type[Any]) -> Entry:
    """Return what a recipe takes from a method's class."""
    shared = [section for _, section in _sections(kind) if hasattr(section, "settings")]
    settings: dict[str, Any] = {}
    requires: dict[str, Any] = {}
    makers: list[Any] = [*map(type, shared), kind]
    for one in makers:
        settings |= one.settings
        requires |= one.requires
    settings |= _changed_defaults(kind)
    groups = {key: value for key, value in settings.items() if (FOLDER / key).is_dir()}
    path = f"{kind.__module__}:{kind.__qualname__}"
    node: dict[str, Any] = {"strategy": {"methods": {kind.name: path}}}
    options = dict(_options(kind))
    for key, value in settings.items():
        if key not in groups:
            _put(node, key, value)
    for key, option in options.items():
        _put(node, key, option["default"])
    return {
        "path": path,
        "name": kind.name,
        "summary": _paragraph(inspect.getdoc(kind) or ""),
        "replaces": sorted(kind.replaces),
        "requires": requires,
        "groups": groups,
        "node": node,
        "options": options,
    }


def _sections(kind: type[Configured]) -> Iterator[tuple[str, Configured]]:
    """Yield the sections of a class, each with its name and defaults."""
    for field in fields(kind).values():
        if section_of(field):
            yield field.name, field.default


def _options(kind: type[Configured]) -> Iterator[tuple[str, Option]]:
    yield from _own_options(kind, None)
    for _, section in _sections(kind):
        yield from _own_options(type(section), section)


def _own_options(kind: type[Configured], values: Configured | None) -> Iterator[tuple[str, Option]]:
    """Yield the keys below a class's own node; ``values`` has other defaults than the class."""
    meanings = _meanings(kind)
    for field in fields(kind).values():
        if field.key or field.in_code or section_of(field):
            continue
        default = field.default if values is None else getattr(values, field.name)
        yield (
            f"{kind.section}.{field.name}",
            {
                "default": field.refers or default,
                "allowed": short_words(in_words(field.annotation)),
                "meaning": meanings.get(field.name, ""),
                "schema": TypeAdapter(field.annotation).json_schema(),
            },
        )


def _changed_defaults(kind: type[Configured]) -> dict[str, Any]:
    """Return the keys outside the method's own whose default the class changes."""
    return {
        field.key: field.default
        for field in fields(kind).values()
        if field.key and field.default != _first_default(kind, field)
    }


def _first_default(kind: type[Configured], field: Field) -> Any:
    declared = [vars(one)[field.name] for one in kind.__mro__ if field.name in vars(one)]
    return declared[-1]


def _meanings(kind: type[Configured]) -> dict[str, str]:
    """Return the text below each field of a class, and of those that it extends."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not issubclass(one, Configured) or not vars(one).get("__annotations__"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _put(node: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = value


def written(methods: Iterable[type[Any]]) -> str:
    """Return the catalogue of these classes, as its file has it."""
    found = {one.name: entry_of(one) for one in sorted(methods, key=lambda one: str(one.name))}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
