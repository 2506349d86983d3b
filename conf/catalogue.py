"""The catalogue of methods and options: what their classes say, in one generated file.

Composing a recipe, ``--help`` and completion need the keys, defaults and meanings, and must not
wait for PyTorch. ``catalogue.json`` has what :func:`method_entry` and :func:`option_entries` make
of the classes (``make docs`` writes it, and a test compares them); a method of the user's own is
imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, get_args

from pydantic import TypeAdapter

from fedhet.common.configured import MISSING, Configured, Field, Option, fields, section_of
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import in_words, short_words
from fedhet.common.outside import import_name

FILE = Path(__file__).with_name("catalogue.json")
METHODS = "strategy"  # the group of the methods; the others have options
LOCAL_OPTIMIZERS = "local/optimizers"  # conf/local/default.yaml has them all
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class CatalogueKey(TypedDict):
    """A key of a method or an option."""

    default: Any  # as a recipe has it
    allowed: str  # in words
    meaning: str
    schema: dict[str, Any]  # JSON schema


class CatalogueEntry(TypedDict):
    """What a recipe takes from the class of an option."""

    summary: str
    node: dict[str, Any]  # of a method: from the recipe's root
    keys: dict[str, CatalogueKey]  # by name


class MethodEntry(CatalogueEntry):
    """What a recipe takes from a method's class.

    ``groups`` are the options that it chooses of other groups; ``requires`` are keys and the only
    value that they may have.
    """

    path: str  # module:class
    name: str
    replaces: list[str]
    requires: dict[str, Any]
    groups: dict[str, str]


@cache
def _catalogue() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def methods() -> Mapping[str, MethodEntry]:
    """Return fedhet's methods by name."""
    found: Mapping[str, MethodEntry] = _catalogue()[METHODS]
    return found


def options() -> Mapping[str, Mapping[str, CatalogueEntry]]:
    """Return the options that classes define, by group and name."""
    return {group: found for group, found in _catalogue().items() if group != METHODS}


def is_own(name: str) -> bool:
    """Return whether a method is named by its class, ``package.module:Class``."""
    return _OWN.fullmatch(name) is not None


@cache
def method_of(name: str) -> MethodEntry:
    """Return a method's entry, by its name or by its class, ``package.module:Class``.

    Raises:
        ConfigError: if there is no such class, or it is no method.
    """
    known = methods()
    if name in known:
        return known[name]
    for one in known.values():
        if one["path"] == name:
            return one
    return method_entry(load(name))


def load(path: str) -> type[Any]:
    """Import a method's class.

    Raises:
        ConfigError: if there is none.
    """
    found = import_name("strategy", path)
    if not (
        isinstance(found, type)
        and issubclass(found, Configured)
        and hasattr(found, "replaces")  # a MethodPart has none
    ):
        raise ConfigError(
            f"strategy={path} is not a method: it must be a subclass of fedhet.Method (docs/own.md)"
        )
    return found


# ------------------------------------------------------------------------------- from the classes
def method_entry(kind: type[Any]) -> MethodEntry:
    """Return what a recipe takes from a method's class."""
    shared = [section for _, section in _sections(kind) if hasattr(section, "settings")]
    settings: dict[str, Any] = {}
    requires: dict[str, Any] = {}
    makers: list[Any] = [*map(type, shared), kind]
    for one in makers:
        settings |= one.settings
        requires |= one.requires
    settings |= _changed_defaults(kind)
    groups = {key: value for key, value in settings.items() if key in options()}
    path = f"{kind.__module__}:{kind.__qualname__}"
    node: dict[str, Any] = {"strategy": {"methods": {kind.name: path}}}
    keys = dict(_method_keys(kind))
    for key, value in settings.items():
        if key not in groups:
            _put(node, key, value)
    for key, own in keys.items():
        _put(node, key, own["default"])
    return {
        "path": path,
        "name": kind.name,
        "summary": _paragraph(inspect.getdoc(kind) or ""),
        "replaces": sorted(kind.replaces),
        "requires": requires,
        "groups": groups,
        "node": node,
        "keys": keys,
    }


def option_entries(kind: type[Option]) -> Iterator[tuple[str, CatalogueEntry]]:
    """Yield the options that a class defines, by name; a base of other classes has none."""
    own = vars(kind)
    variants = own.get("variants") or ({kind.option: {}} if "option" in own else {})
    for name, changed in variants.items():
        parts = [type(value) for value in changed.values() if isinstance(value, Configured)]
        yield (
            name,
            {
                "summary": _paragraph(inspect.getdoc((*parts, kind)[0]) or ""),
                "node": _node(kind, changed),
                "keys": dict(_option_keys(kind, changed)),
            },
        )


def _node(kind: type[Configured], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node that builds a class, with these values in place of its defaults."""
    node: dict[str, Any] = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    for field, value in _values(kind, changed):
        own = isinstance(value, Configured)
        node[field.name] = _node(type(value), {}) if own else _in_recipe(field, value)
    return node


def _option_keys(
    kind: type[Configured], changed: Mapping[str, Any]
) -> Iterator[tuple[str, CatalogueKey]]:
    meanings = _meanings(kind)
    for field, value in _values(kind, changed):
        if isinstance(value, Configured):
            yield from _option_keys(type(value), {})
        elif not any(_is_configured(one) for one in get_args(field.annotation)):
            yield f"{kind.section}.{field.name}", _key(field, value, meanings)


def _values(kind: type[Configured], changed: Mapping[str, Any]) -> Iterator[tuple[Field, Any]]:
    for field in fields(kind).values():
        yield field, changed.get(field.name, field.default)


def _is_configured(annotation: Any) -> bool:
    """Return whether a type is a class with parameters of its own, or may be one."""
    is_class = isinstance(annotation, type) and issubclass(annotation, Configured)
    return is_class or any(map(_is_configured, get_args(annotation)))


def _key(field: Field, value: Any, meanings: Mapping[str, str]) -> CatalogueKey:
    return {
        "default": _in_recipe(field, value),
        "allowed": short_words(in_words(field.annotation)),
        "meaning": meanings.get(field.name, ""),
        "schema": TypeAdapter(field.annotation).json_schema(),
    }


def _in_recipe(field: Field, value: Any) -> Any:
    """Return a parameter's default as a recipe has it; ??? where a user has to give it."""
    return field.refers or ("???" if value is MISSING else value)


def _sections(kind: type[Configured]) -> Iterator[tuple[str, Configured]]:
    """Yield the sections of a class, each with its name and defaults."""
    for field in fields(kind).values():
        if section_of(field):
            yield field.name, field.default


def _method_keys(kind: type[Configured]) -> Iterator[tuple[str, CatalogueKey]]:
    yield from _own_keys(kind, None)
    for _, section in _sections(kind):
        yield from _own_keys(type(section), section)


def _own_keys(
    kind: type[Configured], values: Configured | None
) -> Iterator[tuple[str, CatalogueKey]]:
    """Yield the keys below a class's own node; ``values`` has other defaults than the class."""
    meanings = _meanings(kind)
    for field in fields(kind).values():
        if field.key or field.in_code or section_of(field):
            continue
        default = field.default if values is None else getattr(values, field.name)
        yield f"{kind.section}.{field.name}", _key(field, default, meanings)


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


def written(methods: Iterable[type[Any]], options: Iterable[type[Option]]) -> str:
    """Return the catalogue of these classes, as its file has it."""
    found: dict[str, dict[str, Any]] = {}
    for kind in options:
        found.setdefault(kind.group, {}).update(option_entries(kind))
    found[METHODS] = {one.name: method_entry(one) for one in methods}
    found = {group: dict(sorted(each.items())) for group, each in sorted(found.items())}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
