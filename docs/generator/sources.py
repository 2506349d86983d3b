"""Files of the repository that pages link to, as pages: the site needs nothing but itself."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.generator.recipes import ROOT

PLACE = "source"  # in the site
_CODE = re.compile(r"(```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash"}


def repository_path(page: str) -> str:
    """Return where a page of the site lies in the repository, such as docs/own.md."""
    return page.removeprefix(f"{PLACE}/") if page.startswith(f"{PLACE}/") else f"docs/{page}"


def relinked(markdown: str, page: str) -> str:
    """Return a page's Markdown with its links to files outside docs/ leading into the site."""

    def place(target: str) -> str:
        name, hash, anchor = target.partition("#")
        if not name or "://" in name or name.startswith("mailto:"):
            return target
        path = _resolved(name, page)
        if path is None:
            return target  # the strict build reports it
        uri = path.removeprefix("docs/") if path.startswith("docs/") else page_of(path)
        return posixpath.relpath(uri, posixpath.dirname(page) or ".") + hash + anchor

    return _replace(markdown, place)


def linked_sources(markdown: str, page: str) -> set[str]:
    """Return the files and folders outside docs/ that a page links to."""
    found: set[str] = set()

    def note(target: str) -> str:
        path = _resolved(target.partition("#")[0], page) if "://" not in target else None
        if path is not None and not path.startswith("docs/"):
            found.add(path)
        return target

    _replace(markdown, note)
    return found


def page_of(path: str) -> str:
    """Return the site's page of a file or folder of the repository."""
    if (ROOT / path).is_dir():
        return f"{PLACE}/{path}/index.md"
    return f"{PLACE}/{path}" if path.endswith(".md") else f"{PLACE}/{path}.md"


def source_page(path: str) -> str:
    """Return a file, or a folder's list of files, as a page that the search leaves out."""
    file, head = ROOT / path, "---\nsearch:\n  exclude: true\n---\n"
    if file.is_dir():
        names = sorted(p.relative_to(file).as_posix() for p in _files(file))
        return f"{head}# {path}/\n\nFiles in the repository:\n\n" + "".join(
            f"- [{name}]({name})\n" for name in names
        )
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook_page(text, path)
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{head}# {path}\n\n`````` {language}\n{text}\n``````\n"


def notebook_page(text: str, path: str) -> str:
    """Return a notebook's cells as a page."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    shown = [f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells]
    title, _, rest = shown[0].partition("\n")
    return "\n\n".join([title, f"The notebook `{path}`, cell by cell.", rest, *shown[1:]]) + "\n"


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.suffix in (*_LANGUAGES, ".md") and "__pycache__" not in path.parts:
            yield path


def _resolved(name: str, page: str) -> str | None:
    """Return the path in the repository that a page's link leads to; None if there is none."""
    if not name:
        return None
    where = posixpath.dirname(repository_path(page))
    file = ROOT / posixpath.normpath(posixpath.join(where, name))
    if not file.exists():
        return None
    try:
        path = file.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return None
    return f"{path}/README.md" if path == "docs/results" else path


def _replace(markdown: str, place: Callable[[str], str]) -> str:
    pieces = _CODE.split(markdown)
    for index in range(0, len(pieces), 2):
        pieces[index] = _LINK.sub(lambda found: place(found[1]), pieces[index])
    return "".join(pieces)
