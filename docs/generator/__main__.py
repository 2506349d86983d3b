"""Writes the files of the repository that are made of the schema: ``python -m docs.generator``."""

from __future__ import annotations

from pathlib import Path

from docs.generator.keys import SCHEMA, commented_files, json_schema


def made_of_schema() -> dict[Path, str]:
    """Return the JSON schema, and the files of conf/ with their comments."""
    return {SCHEMA: json_schema(), **commented_files()}


def main() -> None:
    """Write them."""
    for path, text in made_of_schema().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
