"""Writes what is made of schema and classes: ``python -m docs.generator``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from docs.generator.keys import SCHEMA, commented_files, json_schema
from fedhet.conf import catalogue
from fedhet.conf.project import FOLDER
from fedhet.strategies.method import Method

PUBLIC = FOLDER.parent / "fedhet" / "public_names.py"
_OF_METHOD = re.compile(r"from fedhet\.strategies\.(?!method |parts )")


def made_of_schema() -> dict[Path, str]:
    """Return the catalogue of methods, the public names, the JSON schema, and conf/'s comments."""
    return {
        catalogue.FILE: catalogue.written(methods()),
        PUBLIC: public_names(),
        SCHEMA: json_schema(),
        **commented_files(),
    }


def methods() -> list[type[Method]]:
    """Return the methods' classes: those of the files of strategies/, one file a paper."""
    found = []
    for path in sorted((FOLDER.parent / "strategies").glob("*.py")):
        module = importlib.import_module(f"fedhet.strategies.{path.stem}")
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
