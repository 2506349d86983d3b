"""Writes what is made from recipes, schema and code: ``python -m docs.generator``."""

from __future__ import annotations

from pathlib import Path

from docs.generator.experiments import experiments_page
from docs.generator.keys import SCHEMA, commented_files, json_schema, keys_page
from docs.generator.pages import METHODS, index, method_page
from docs.generator.recipes import ROOT, all_methods


def pages() -> dict[Path, str]:
    """Return every page by its file."""
    methods = all_methods()
    written = {METHODS / f"{method.id}.md": method_page(method) for method in methods}
    written[METHODS.with_suffix(".md")] = index(methods)
    written[ROOT / "docs" / "experiments.md"] = experiments_page()
    return written | made_of_schema()


def made_of_schema() -> dict[Path, str]:
    """Return the files that the schema of the recipe alone makes; the others take minutes."""
    written = {ROOT / "docs" / "keys.md": keys_page(), SCHEMA: json_schema(), **commented_files()}
    return written


def main() -> None:
    """Write the pages, and remove those of methods that are gone."""
    written = pages()
    METHODS.mkdir(exist_ok=True)
    for path in set(METHODS.glob("*.md")) - set(written):
        path.unlink()
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(written)} files in {METHODS.parent.relative_to(ROOT)}/ and conf/")


if __name__ == "__main__":
    main()
