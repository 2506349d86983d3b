"""Writes docs/methods.md, docs/methods/ and docs/experiments.md: ``python -m docs.generator``."""

from __future__ import annotations

from pathlib import Path

from docs.generator.experiments import experiments_page
from docs.generator.pages import METHODS, index, method_page
from docs.generator.recipes import ROOT, all_methods


def pages() -> dict[Path, str]:
    """Return every page by its file."""
    methods = all_methods()
    written = {METHODS / f"{method.id}.md": method_page(method) for method in methods}
    written[METHODS.with_suffix(".md")] = index(methods)
    written[ROOT / "docs" / "experiments.md"] = experiments_page()
    return written


def main() -> None:
    """Write the pages, and remove those of methods that are gone."""
    written = pages()
    METHODS.mkdir(exist_ok=True)
    for path in set(METHODS.glob("*.md")) - set(written):
        path.unlink()
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(written)} pages in {METHODS.parent.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
