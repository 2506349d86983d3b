"""Writes the files of the repository that are made of the schema: ``python -m docs.generator``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import fedhet
from docs.generator.keys import SCHEMA, commented_files, json_schema
from fedhet import strategies
from fedhet.common.configured import Option
from fedhet.conf import catalogue
from fedhet.strategies.method import Method


def made_of_schema() -> dict[Path, str]:
    """Return the JSON schema, and the files of conf/ with their comments."""
    return {SCHEMA: json_schema(), **commented_files()}


def made_of_classes() -> str:
    """Return the catalogue of the methods and options, from their classes."""
    public = [getattr(fedhet, name) for name in fedhet.__all__]
    methods = [one for one in public if isinstance(one, type) and issubclass(one, Method)]
    for module in walk_packages(strategies.__path__, f"{strategies.__name__}."):
        import_module(module.name)
    return catalogue.written(
        [one for one in methods if one is not Method],
        [one for one in _subclasses(Option) if one.__module__.startswith(strategies.__name__)],
    )


def _subclasses(kind: type[Option]) -> Iterator[type[Option]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def main() -> None:
    """Write them."""
    catalogue.FILE.write_text(made_of_classes(), encoding="utf-8")
    for path, text in made_of_schema().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
