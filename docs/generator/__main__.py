"""Writes what is made of schema and classes: ``python -m docs.generator``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

from docs.generator import modes
from docs.generator.keys import SCHEMA, commented_files, json_schema
from fedhet import strategies
from fedhet.common.configured import Option
from fedhet.conf import catalogue
from fedhet.conf.project import FOLDER
from fedhet.strategies.method import Method

PUBLIC = FOLDER.parent / "fedhet" / "public_names.py"
_OF_METHOD = re.compile(r"from fedhet\.strategies\.(?!method |parts )")


def made_of_schema() -> dict[Path, str]:
    """Return the catalogue, public names, JSON schema, modes and conf/'s comments."""
    return {
        catalogue.FILE: catalogue.written(methods(), options()),
        PUBLIC: public_names(),
        SCHEMA: json_schema(),
        modes.PAGE: modes.page(),
        **commented_files(),
    }


def options() -> list[type[Option]]:
    """Return the classes that are, or are a base of, options."""
    for module in walk_packages(strategies.__path__, f"{strategies.__name__}."):
        import_module(module.name)
    found = _subclasses(Option)
    return [one for one in found if one.__module__.startswith(f"{strategies.__name__}.")]


def _subclasses(kind: type[Option]) -> Iterator[type[Option]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def methods() -> list[type[Method]]:
    """Return the methods' classes: those of the files of strategies/, one file a paper."""
    found = []
    for path in sorted((FOLDER.parent / "strategies").glob("*.py")):
        module = import_module(f"fedhet.strategies.{path.stem}")
        own = [one for one in vars(module).values() if isinstance(one, type)]
        found += [
            one
            for one in own
            if issubclass(one, Method)
            and one.__module__ == module.__name__
            and one is not Method
            and not one.__name__.startswith("_")
        ]
    return found


def public_names() -> str:
    """Return fedhet/public_names.py, with the methods' classes."""
    meaning, _, *imports = PUBLIC.read_text(encoding="utf-8").splitlines()
    own = [line for line in imports if not _OF_METHOD.match(line)]
    lines = [f"from {one.__module__} import {one.__name__} as {one.__name__}" for one in methods()]
    return "\n".join([meaning, "", *sorted([*own, *lines])]) + "\n"


def main() -> None:
    """Write them."""
    for path, text in made_of_schema().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
