"""What the recipes in conf/strategy say of their methods."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf import FOLDER, build_part, compose_overrides

ROOT = FOLDER.parent
_HEAD = re.compile(r"(?P<name>[^(]+?) \((?P<paper>[^)]+)\): (?P<summary>.+)")
_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.-]+):(?P<rest>.*)")


@dataclass(frozen=True)
class Option:
    """A key that a recipe brings: its full name, default and comment."""

    key: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Recipe:
    """A file of conf/strategy.

    Attributes:
        method: the recipe's name, as in ``strategy=fedprox``.
        name: the method's name, as in FedProx.
        paper: the short citation.
        summary: what the method is, a sentence or a few.
        path: of the file.
        options: the keys that it brings.
        composed: the whole recipe of ``strategy=<method>``.
    """

    method: str
    name: str
    paper: str
    summary: str
    path: Path
    options: Sequence[Option]
    composed: DictConfig = field(compare=False, repr=False)

    @property
    def slots(self) -> list[str]:
        """The slots that the method cannot do without."""
        return [str(slot) for slot in self.composed.strategy.methods.get(self.method, [])]

    @cached_property
    def targets(self) -> dict[str, str]:
        """The dotted names of the recipe's classes, by their keys."""
        strategy, local = self.composed.strategy, self.composed.local
        parts = {f"local.optimizers.{local.optimizer}": local.optimizers[local.optimizer]}
        for group in ("client_sides", "server_sides", "transforms"):
            parts |= {f"strategy.{group}.{name}": part for name, part in strategy[group].items()}
        for slot in ("aggregator", "server_optimizer", "sampler", "output"):
            parts[f"strategy.{slot}"] = strategy[slot]
        return {key: str(part["_target_"]) for key, part in parts.items()}

    @cached_property
    def sides(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The client and the server halves, instantiated."""
        client = build_part(self.composed, "strategy.client_sides", classifier_tensors=1)
        server = build_part(self.composed, "strategy.server_sides", classifier_tensors=1)
        return client, server


def all_recipes() -> list[Recipe]:
    """Return the recipes of conf/strategy by name."""
    return [read_recipe(path) for path in sorted((FOLDER / "strategy").glob("*.yaml"))]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        ValueError: if its first comment does not have the form that the table needs.
    """
    head = _HEAD.fullmatch(_leading_comment(path.read_text(encoding="utf-8")))
    if head is None:
        raise ValueError(
            f"{path} must begin with a comment `# Name (Authors Year): what it is.`, from which "
            "its page and docs/methods.md are made"
        )
    composed = compose_overrides((f"strategy={path.stem}",))
    return Recipe(
        method=path.stem,
        name=head["name"],
        paper=head["paper"],
        summary=head["summary"],
        path=path,
        options=options_of(path, composed),
        composed=composed,
    )


def options_of(path: Path, recipe: DictConfig) -> list[Option]:
    """Return the keys that a recipe or a group it chooses sets with a comment behind them.

    A key without one is wiring: what the author chose, and not the user.
    """
    composed = OmegaConf.to_container(recipe)
    assert isinstance(composed, dict)
    values = dict(leaves(composed))
    found: dict[str, str] = {}
    for file in [*_files_of(path), *_slots_of(path, composed)]:
        for key, comment in _keys_of(file):
            found[key] = found.get(key) or comment
    return [
        Option(key, _shown(values[key]), comment)
        for key, comment in found.items()
        if comment and key in values and not _is_reference(values[key])
    ]


def leaves(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nested mapping with its dotted key."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _leading_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def _files_of(path: Path) -> list[Path]:
    """Return a file of conf/ and those parts of a strategy that its defaults list chooses."""
    files = [path]
    for group, options in _choices(path):
        if group.partition("/")[0] in ("strategy", "base"):
            for option in options:
                files += _files_of(FOLDER / group / f"{option}.yaml")
    return list(dict.fromkeys(files))


def _slots_of(path: Path, composed: Mapping[Any, Any]) -> list[Path]:
    """Return the files of the slots that a method needs and leaves as they are by default."""
    chosen = {group for group, _ in _choices(path)}
    base = dict(_choices(FOLDER / "config.yaml"))
    groups = [f"strategy/{slot}" for slot in composed["strategy"]["methods"].get(path.stem, [])]
    return [
        FOLDER / group / f"{option}.yaml"
        for group in groups
        if group in base and group not in chosen
        for option in base[group]
    ]


def _choices(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the groups of a defaults list with the options chosen."""
    inside = path.parent.relative_to(FOLDER).as_posix()
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    for entry in content.get("defaults", []):
        if isinstance(entry, str):
            if entry != "_self_":
                group, _, option = entry.rpartition("/")
                yield group.lstrip("/") or inside, [option]
            continue
        [(words, option)] = entry.items()
        group = str(words).split()[-1].partition("@")[0]  # after "override" or "optional"
        full = group.lstrip("/") if group.startswith("/") or inside == "." else f"{inside}/{group}"
        yield full, option if isinstance(option, list) else [str(option)]


def _keys_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the full keys of a file's options with their comments."""
    text = path.read_text(encoding="utf-8")
    package = re.match(r"# @package (\S+)", text)
    where = package[1] if package else path.parent.relative_to(FOLDER).as_posix().replace("/", ".")
    prefix = "" if where == "_global_" else f"{where}."
    comments = dict(_comments(text))
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    for key, _ in leaves(content):
        full = f"{prefix}{key}"
        hidden = key.startswith(("defaults", "hydra.")) or full.startswith("strategy.methods.")
        if not hidden and not key.rpartition(".")[2].startswith("_"):
            yield full, comments.get(key, "")


def _comments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the comments that stand behind keys, by dotted key."""
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        indent = len(found["indent"])
        stack = [*(entry for entry in stack if entry[0] < indent), (indent, found["key"])]
        comment = re.search(r"\s#\s*(.*)", found["rest"])
        if comment:
            yield ".".join(key for _, key in stack), comment[1]


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\$\{[^}]*\}", value) is not None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
