"""Finds keys in the schema: their fields, their variants, and all keys in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from fedhet.common.kinds import Section, choices_of, in_words
from fedhet.conf.schema import Recipe

Variants = Mapping[str, type[Section]]
_HIDDEN = ("run_log",)  # fedhet's own


@dataclass(frozen=True)
class FoundKey:
    """A key of the recipe and its field; None: the schema has no such key."""

    path: tuple[str, ...]
    field: FieldInfo | None
    model: type[Section] | None  # the node that it belongs to, or that has no such key

    @property
    def name(self) -> str:
        """The key with dots."""
        return ".".join(self.path)

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        return in_words(self.field.annotation, self.field.metadata) if self.field else ""

    @property
    def choices(self) -> list[str]:
        """The values of a choice; empty for other types."""
        return choices_of(self.field.annotation) if self.field else []


def variants_of(field: FieldInfo) -> Variants:
    """Return the models of a field that is one of several, by tag; empty for other fields."""
    found: dict[str, type[Section]] = {}
    for one in get_args(field.annotation):
        tag = None
        if get_origin(one) is Annotated:
            one, *metadata = get_args(one)
            tag = next((each.tag for each in metadata if isinstance(each, Tag)), None)
        if not (isinstance(one, type) and issubclass(one, Section)):
            continue
        if tag:
            found[tag] = one
        elif isinstance(field.discriminator, str):
            found |= dict.fromkeys(_literals(one, field.discriminator), one)
    return found


def fields_of(model: type[Section]) -> dict[str, FieldInfo]:
    """Return a model's fields by the names that recipes use."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def locate(location: Sequence[str | int]) -> FoundKey:
    """Return the key that a validation error is about, from pydantic's location."""
    model: type[Section] | None = Recipe
    inside: Any = None  # variants, or the type of a mapping's values
    path: list[str] = []
    field: FieldInfo | None = None
    for part in location:
        if isinstance(inside, Mapping):
            model, inside = inside.get(str(part)), None
            if model is None:
                break
            continue
        if inside is not None:
            path.append(str(part))
            model, inside, field = inside, None, None
            continue
        if model is None or isinstance(part, int):
            break
        path.append(part)
        field = fields_of(model).get(part)
        if field is None:
            break
        owner, (model, inside) = model, _content(field)
        if model is None and inside is None:
            return FoundKey(tuple(path), field, owner)
    return FoundKey(tuple(path), field, model)


def _content(field: FieldInfo) -> tuple[type[Section] | None, Any]:
    """Return the model in a field, and its variants or the type of its values."""
    if variants := variants_of(field):
        return None, variants
    for one in (field.annotation, *get_args(field.annotation)):
        if isinstance(one, type) and issubclass(one, Section):
            return one, None
        if get_origin(one) is dict:
            value = get_args(one)[1]
            if isinstance(value, type) and issubclass(value, Section):
                return None, value
        if get_origin(one) is list:
            break  # an element is shown with its list
    return None, None


def keys_below(
    model: type[Section], path: tuple[str, ...] = (), tags: Mapping[str, str] | None = None
) -> Iterator[FoundKey]:
    """Yield the keys of a model in order.

    Args:
        model: of the node.
        path: of the node.
        tags: which variant of a key to descend into; without one, none is.
    """
    for name, field in fields_of(model).items():
        here = (*path, name)
        variants = variants_of(field)
        if variants:
            if chosen := variants.get((tags or {}).get(name, "")):
                yield from keys_below(chosen, here, tags)
            continue
        content, _ = _content(field)
        if name in _HIDDEN:
            continue
        if (content is not None and content.model_config.get("extra") != "allow") or name in NODES:
            assert content is not None
            below = list(keys_below(content, here, tags))
            yield from below or [FoundKey(here, field, model)]
        elif not name.startswith("_"):
            yield FoundKey(here, field, model)


NODES = ("strategy", "logger")  # nodes with fixed keys and others


def tags_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return which variant a recipe has chosen, by group."""
    found = {}
    for group, field in fields_of(Recipe).items():
        node = values.get(group)
        for tag in variants_of(field):
            names = (node.get("name"), node.get("inputs", "images")) if node else ()
            if tag in names:
                found[group] = tag
    return found


def _literals(model: type[Section], name: str) -> list[str]:
    annotation = model.model_fields[name].annotation
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []
