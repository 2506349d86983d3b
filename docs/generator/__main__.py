"""Writes the files of the repository that are made of the schema: ``python -m docs.generator``."""

from __future__ import annotations

from pathlib import Path

import fedhet
from docs.generator.keys import SCHEMA, commented_files, json_schema
from fedhet.conf import catalogue
from fedhet.strategies.method import Method


def made_of_schema() -> dict[Path, str]:
    """Return the JSON schema, and the files of conf/ with their comments."""
    return {SCHEMA: json_schema(), **commented_files()}


def made_of_methods() -> str:
    """Return the catalogue of the methods, from their classes."""
    public = [getattr(fedhet, name) for name in fedhet.__all__]
    methods = [one for one in public if isinstance(one, type) and issubclass(one, Method)]
    return catalogue.written(one for one in methods if one is not Method)


def main() -> None:
    """Write them."""
    catalogue.FILE.write_text(made_of_methods(), encoding="utf-8")
    for path, text in made_of_schema().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
