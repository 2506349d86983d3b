"""The methods: what their recipes in conf/strategy and their classes say of them."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from docs.generator.markdown import first_sentence, url_after
from docs.generator.measure import Cost, stored
from fedhet.conf import FOLDER, compose_overrides
from fedhet.conf.mistakes import first_comment, method_lines
from fedhet.strategies.base import ClientSide, ServerSide

ROOT = FOLDER.parent
_NOTES = Path(__file__).parent / "notes"
_HEAD = re.compile(r"(?P<name>[^(]+?) \((?P<paper>[^)]+)\): (?P<summary>.+)")
_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.-]+):(?P<rest>.*)")
_HOOKS: Mapping[type, tuple[str, Sequence[str]]] = {
    ClientSide: ("client half", ("begin", "penalty", "correct", "end", "own_model", "upload")),
    ServerSide: ("server half", ("broadcast", "reduce")),
}
_SLOTS = ("aggregator", "server_optimizer", "sampler", "output")


@dataclass(frozen=True)
class Option:
    """A key that a recipe brings: its full name, default and comment."""

    key: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Part:
    """A class of a recipe.

    Attributes:
        role: what it is, such as "client half".
        name: of the class.
        path: of its file.
        says: the first paragraph of its docstring.
        hooks: which of its half's hooks it has.
    """

    role: str
    name: str
    path: Path
    says: str
    hooks: Sequence[str] = ()


@dataclass(frozen=True)
class Method:
    """A file of conf/strategy.

    Attributes:
        id: as in ``strategy=fedprox``.
        name: as in FedProx.
        paper: the short citation.
        summary: what the method is, a sentence or a few.
        path: of the recipe.
        recipe: all of it, composed.
        base: FedAvg's.
    """

    id: str
    name: str
    paper: str
    summary: str
    path: Path
    recipe: DictConfig
    base: DictConfig

    @property
    def slots(self) -> list[str]:
        """The slots that the method cannot do without."""
        return [str(slot) for slot in self.recipe.strategy.methods.get(self.id, [])]

    @cached_property
    def parts(self) -> list[Part]:
        """The recipe's classes that are not FedAvg's, and those of its slots."""
        common = _targets(self.base) if self.id != "fedavg" else {}
        return [
            _part(key, target)
            for key, target in _targets(self.recipe).items()
            if common.get(key) != target or key in self.slots
        ]

    @cached_property
    def module(self) -> Path | None:
        """The method's own file, or else that of the part that makes it."""
        own = ROOT / "strategies" / f"{self.id}.py"
        makers = [part.path for part in self.parts if part.role != "reply transform"]
        return own if own.exists() else next(iter(makers), None)

    @cached_property
    def docstring(self) -> str:
        """The docstring of the method's file."""
        return ast.get_docstring(ast.parse(self.module.read_text())) or "" if self.module else ""

    @property
    def is_alone(self) -> bool:
        """Whether the method has a file of its own, whose docstring is about it alone."""
        return self.module is not None and self.module.stem == self.id

    @property
    def url(self) -> str:
        """The paper's address; empty if neither docstring nor recipe has one."""
        found = url_after(self.docstring, self.paper.split()[0].rstrip(","))
        found = found or url_after(self.summary, "")
        return found or (url_after(self.docstring, "") if self.is_alone else "")

    @cached_property
    def strategy(self) -> type | None:
        """The Flower strategy of the method's file that has its name."""
        if not self.is_alone:
            return None
        wanted = "".join(filter(str.isalnum, self.name)).lower()
        module = importlib.import_module(f"fedhet.strategies.{self.id}")
        return next((v for n, v in vars(module).items() if n.lower() == wanted), None)

    @cached_property
    def cost(self) -> Cost:
        """What the recipe sends and keeps with its defaults."""
        return stored(self.id)

    @property
    def notes(self) -> str:
        """Markdown written by hand."""
        path = _NOTES / f"{self.id}.md"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    @cached_property
    def options(self) -> list[Option]:
        """The keys with a comment in the recipe's files; one without is wiring."""
        found: dict[str, str] = {}
        for file in dict.fromkeys([*_files_of(self.path), *self._slot_files()]):
            for key, comment in _comments(file):
                found.setdefault(key, comment)
        plain = OmegaConf.to_container(self.recipe)  # references are shown, not followed
        values = {key: _value(plain, key) for key in found}
        return [
            Option(key, value if isinstance(value, str) else json.dumps(value), found[key])
            for key, value in values.items()
            if value is not None and not re.fullmatch(r"\$\{[^}]*\}", str(value))
        ]

    def _slot_files(self) -> Iterator[Path]:
        if not self.slots:
            return
        with initialize_config_dir(config_dir=str(FOLDER), version_base="1.3"):
            words = [f"strategy={self.id}"]
            choices = compose("config", words, return_hydra_config=True).hydra.runtime.choices
        for slot in self.slots:
            if f"strategy/{slot}" in choices:
                yield FOLDER / "strategy" / slot / f"{choices[f'strategy/{slot}']}.yaml"


def all_methods() -> list[Method]:
    """Return every recipe's method: FedAvg, then the others by name."""
    methods = [read_method(path) for path in (FOLDER / "strategy").glob("*.yaml")]
    return sorted(methods, key=lambda method: (method.id != "fedavg", method.name.lower()))


def method_names() -> dict[str, str]:
    """Return the methods' names by their ids: FedAvg, then the others by name."""
    names = {id: line.partition(" (")[0] for id, line in method_lines().items()}
    return dict(sorted(names.items(), key=lambda item: (item[0] != "fedavg", item[1].lower())))


def read_method(path: Path) -> Method:
    """Read a recipe file.

    Raises:
        ValueError: if its first comment does not have the form that the table needs.
    """
    head = _HEAD.fullmatch(first_comment(path))
    if head is None:
        raise ValueError(
            f"{path} must begin with a comment `# Name (Authors Year): what it is.`, from which "
            "docs/methods.md is made"
        )
    recipe, base = (compose_overrides((f"strategy={name}",)) for name in (path.stem, "fedavg"))
    return Method(path.stem, head["name"], head["paper"], head["summary"], path, recipe, base)


def _targets(recipe: DictConfig) -> dict[str, str]:
    """Return the dotted names of a recipe's classes by their places."""
    strategy, local = recipe.strategy, recipe.local
    parts: dict[str, Any] = {"optimizer": local.optimizers[local.optimizer]}
    for group in ("client_sides", "server_sides", "transforms"):
        parts |= {f"{group}.{name}": part for name, part in strategy[group].items()}
    parts |= {slot: strategy[slot] for slot in _SLOTS}
    return {key: str(part["_target_"]) for key, part in parts.items()}


def _part(key: str, target: str) -> Part:
    module, _, name = target.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    path, says = ROOT / f"{module.replace('.', '/')}.py", first_sentence(made.__doc__)
    for side, (role, hooks) in _HOOKS.items():
        if key.startswith(("client_sides", "server_sides")) and issubclass(made, side):
            own = [hook for hook in hooks if getattr(made, hook) is not getattr(side, hook)]
            return Part(role, name, path, says, own)
    roles = {"optimizer": "local optimizer", "server_optimizer": "server optimizer"}
    role = "reply transform" if key.startswith("transforms") else roles.get(key, key)
    return Part(role, name, path, says)


def _value(node: Any, key: str) -> Any:
    """Return the value at a dotted key; None where there is none, or a mapping."""
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return None if isinstance(node, Mapping) else node


def _files_of(path: Path) -> Iterator[Path]:
    """Yield a recipe and the files below conf/base that its defaults list names."""
    yield path
    content = OmegaConf.to_container(OmegaConf.load(path))
    for entry in content.get("defaults", []):  # type: ignore[union-attr]
        if isinstance(entry, str) and entry.startswith("/base/"):
            yield from _files_of(FOLDER / f"{entry[1:]}.yaml")


def _comments(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the full keys of a file that have a comment behind them, with it."""
    text = path.read_text(encoding="utf-8")
    package = re.match(r"# @package (\S+)", text)
    where = package[1] if package else path.parent.relative_to(FOLDER).as_posix().replace("/", ".")
    start = [] if where == "_global_" else [(-1, where)]
    stack: list[tuple[int, str]] = start
    for line in text.splitlines():
        if found := _LINE.fullmatch(line):
            indent = len(found["indent"])
            stack = [*(entry for entry in stack if entry[0] < indent), (indent, found["key"])]
            key = ".".join(key for _, key in stack)
            comment = re.search(r"\s#\s*(.*)", found["rest"])
            if comment and not re.search(r"\._|\.(methods|requires)\b", key):
                yield key, comment[1]
