"""Which tests a method is in: those that name it, its classes or a recipe with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from docs.generator.prose import first_sentence
from docs.generator.recipes import ROOT, Recipe

_MATRIX = ROOT / "tests" / "test_every_strategy.py"
_FOLDER = ROOT / "tests" / "strategies"  # elsewhere methods are only there to be run


@dataclass(frozen=True)
class Test:
    """A test function.

    Attributes:
        path: of its file.
        name: of the function.
        says: the first sentence of its docstring.
        text: its source, lower case, with the module's constants that it uses.
        classes: dotted names of the imported things it uses.
    """

    path: Path
    name: str
    says: str
    text: str
    classes: frozenset[str]

    def names(self, words: Collection[str]) -> bool:
        """Return whether one of these words is in the test."""
        return any(
            word in self.text  # at once, where most are not
            and re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", self.text)
            for word in map(str.lower, words)
        )


def checks_of(recipe: Recipe, base: Recipe) -> list[Test]:
    """Return the tests that a recipe's method is in; first those that are about it.

    Args:
        recipe: the method's.
        base: FedAvg's, whose classes are in every recipe.
    """
    common = set(base.targets.values())
    own = {target for target in recipe.targets.values() if target not in common}
    slots = {f"strategy.{slot}" for slot in recipe.slots}  # of which some hold no class
    own |= {recipe.targets[slot] for slot in slots & recipe.targets.keys()}
    names = {recipe.method, recipe.name}
    found = [test for test in all_tests() if test.names(names) or test.classes & own]
    return sorted(found, key=lambda test: recipe.method not in test.name)


@lru_cache(maxsize=1)
def all_tests() -> tuple[Test, ...]:
    """Return every test of the methods, by file and place in it."""
    paths = [*sorted(_FOLDER.rglob("test_*.py")), _MATRIX]
    return tuple(test for path in paths for test in _tests_in(path))


def _tests_in(path: Path) -> Iterator[Test]:
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    constants = {
        target.id: node
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    imports = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            parts = _with_constants(node, constants)
            used = {name for part in parts for name in _names(part)}
            yield Test(
                path=path,
                name=node.name,
                says=first_sentence(ast.get_docstring(node)),
                text="\n".join(ast.unparse(part) for part in parts).lower(),
                classes=frozenset(imports[name] for name in used if name in imports),
            )


def _with_constants(node: ast.stmt, constants: dict[str, ast.Assign]) -> list[ast.stmt]:
    """Return a function and the module's constants that it uses, directly or through another."""
    parts = [node]
    for part in parts:  # grows meanwhile
        for name in sorted(_names(part)):
            if name in constants and constants[name] not in parts:
                parts.append(constants[name])
    return parts


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@lru_cache(maxsize=1)
def matrix() -> tuple[tuple[str, ...], ...]:
    """Return the words of every recipe in tests/test_every_strategy.py."""
    for node in ast.parse(_MATRIX.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPES":
            return tuple(tuple(words) for words, *_ in ast.literal_eval(node.value))
    raise ValueError(f"{_MATRIX} has no list RECIPES")


def matrix_of(method: str) -> list[tuple[str, ...]]:
    """Return the recipes of the matrix that a method is in."""
    return [words for words in matrix() if method in methods_in(words)]


def methods_in(words: Sequence[str]) -> list[str]:
    """Return the methods that a recipe's words name."""
    found = [word for word in words if word.startswith("strategy=")]
    return found[0].removeprefix("strategy=").strip("[]").split(",") if found else []
