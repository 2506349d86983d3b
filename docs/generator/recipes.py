"""The methods, as their classes describe them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.utils import get_class

from docs.generator.markdown import first_sentence, url_after
from docs.generator.measure import Cost, stored
from fedhet.common.configured import fields, section_of
from fedhet.common.nested import leaves
from fedhet.conf import FOLDER, compose_overrides
from fedhet.conf.catalogue import MethodEntry, load, method_of, methods
from fedhet.strategies.base import ClientSide, ServerSide
from fedhet.strategies.parts import Parts

ROOT = FOLDER.parent
_NOTES = Path(__file__).parent / "notes"
_HEAD = re.compile(r"(?P<name>[^(]+?) \((?P<paper>[^)]+)\): (?P<summary>.+)")
_HOOKS: Mapping[type, tuple[str, Sequence[str]]] = {
    ClientSide: ("client half", ("begin", "penalty", "correct", "end", "own_model", "upload")),
    ServerSide: ("server half", ("broadcast", "reduce")),
}
_SLOTS = ("aggregator", "server_optimizer", "sampler", "output")


@dataclass(frozen=True)
class DocumentedKey:
    """A key that a method has, or sets elsewhere: its full name, default and meaning."""

    key: str
    default: str
    allowed: str
    meaning: str


@dataclass(frozen=True)
class DocumentedPart:
    """A class that a method adds or replaces.

    Attributes:
        role: what it is, such as "client half".
        name: of the class.
        path: of its file.
        says: the first sentence of its docstring.
        hooks: which of its half's hooks it has.
    """

    role: str
    name: str
    path: Path
    says: str
    hooks: Sequence[str] = ()


@dataclass(frozen=True)
class DocumentedMethod:
    """A method of the catalogue.

    Attributes:
        id: as in ``strategy=fedprox``.
        name: as in FedProx.
        paper: the short citation.
        summary: what the method is, a sentence or a few.
        kind: its class.
        entry: what a recipe takes from it.
    """

    id: str
    name: str
    paper: str
    summary: str
    kind: type[Any]
    entry: MethodEntry

    @cached_property
    def parts(self) -> list[DocumentedPart]:
        """The classes that it adds to FedAvg, and those that it replaces."""
        found: Parts = self.kind.unbound({}).all_parts()
        halves = [*found.client_sides.values(), *found.server_sides.values()]
        parts = [_half(type(one)) for one in halves]
        parts += [_part("reply transform", type(one)) for one in found.transforms.values()]
        slots = {slot: getattr(found, slot) for slot in _SLOTS}
        parts += [_part(slot.replace("_", " "), type(one)) for slot, one in slots.items() if one]
        if "optimizer" in self.entry["replaces"]:
            local = compose_overrides((f"strategy={self.id}",)).local
            target = str(local.optimizers[local.optimizer]["_target_"])
            parts.append(_part("local optimizer", get_class(target)))
        return parts

    @property
    def module(self) -> Path:
        """The method's file."""
        return _file(self.kind)

    @property
    def docstring(self) -> str:
        """The docstring of the method's file."""
        return inspect.getdoc(sys.modules[self.kind.__module__]) or ""

    @property
    def is_alone(self) -> bool:
        """Whether the method has a file of its own, whose docstring is about it alone."""
        return self.module.stem == self.id

    @property
    def url(self) -> str:
        """The paper's address; empty if no docstring has one."""
        author = self.paper.split()[0].rstrip(",")
        sections = [section_of(one) for one in fields(self.kind).values()]
        modules = [self.kind.__module__, *(one.__module__ for one in sections if one)]
        modules += [f"fedhet.{_module(part.path)}" for part in self.parts]
        texts = [sys.modules[name].__doc__ or "" for name in modules]
        found = next((url for text in texts if (url := url_after(text, author))), "")
        return found or (url_after(self.docstring, "") if self.is_alone else "")

    @cached_property
    def cost(self) -> Cost:
        """What the method sends and keeps with its defaults."""
        return stored(self.id)

    @property
    def notes(self) -> str:
        """Markdown written by hand."""
        path = _NOTES / f"{self.id}.md"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    @property
    def options(self) -> list[DocumentedKey]:
        """Its keys."""
        return [
            DocumentedKey(key, _shown(one["default"]), one["allowed"], one["meaning"])
            for key, one in self.entry["keys"].items()
        ]

    @property
    def settings(self) -> dict[str, str]:
        """The keys and groups that it sets elsewhere, as a command line has them."""
        plain = {key: _shown(value) for key, value in leaves(self.entry["node"])}
        other = {
            key: value
            for key, value in plain.items()
            if key not in self.entry["keys"] and not key.startswith("strategy.methods.")
        }
        return {**self.entry["groups"], **other}


def all_methods() -> list[DocumentedMethod]:
    """Return every method: FedAvg, then the others by name."""
    return sorted(map(read_method, methods()), key=lambda one: _order(one.id, one.name))


def method_names() -> dict[str, str]:
    """Return the methods' names by their ids: FedAvg, then the others by name."""
    names = {id: one["summary"].partition(" (")[0] for id, one in methods().items()}
    return dict(sorted(names.items(), key=lambda item: _order(*item)))


def _order(id: str, name: str) -> tuple[bool, str]:
    return id != "fedavg", name.lower()


def read_method(id: str) -> DocumentedMethod:
    """Return a method of the catalogue.

    Raises:
        ValueError: if its class's docstring does not begin as the table needs.
    """
    found = method_of(id)
    head = _HEAD.fullmatch(found["summary"])
    if head is None:
        raise ValueError(
            f"the docstring of {found['path']} must begin `Name (Authors Year): what it is.`, from "
            "which docs/methods.md is made"
        )
    kind = load(found["path"])
    return DocumentedMethod(id, head["name"], head["paper"], head["summary"], kind, found)


def _half(made: type) -> DocumentedPart:
    side = next(one for one in _HOOKS if issubclass(made, one))
    role, hooks = _HOOKS[side]
    own = [hook for hook in hooks if getattr(made, hook) is not getattr(side, hook)]
    return DocumentedPart(role, made.__name__, _file(made), first_sentence(made.__doc__), own)


def _part(role: str, made: type) -> DocumentedPart:
    return DocumentedPart(role, made.__name__, _file(made), first_sentence(made.__doc__))


def _file(made: type) -> Path:
    module = importlib.import_module(made.__module__).__name__.removeprefix("fedhet.")
    return ROOT / f"{module.replace('.', '/')}.py"


def _module(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
