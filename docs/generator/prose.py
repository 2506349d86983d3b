"""Docstrings and comments as GitHub's Markdown."""

from __future__ import annotations

import inspect
import re
from itertools import groupby

_LIST = re.compile(r"([-*]|\d+[.)]) ")
_URL = re.compile(r"https?://[^\s)>,]+")


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: what is indented or aligned is kept as it stands.

    Equations are such blocks. They stay as they are written, in ASCII and in the code's own names,
    rather than being translated.
    """
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    return "\n\n".join(_block(block.splitlines()) for block in _joined(blocks))


def _joined(blocks: list[str]) -> list[str]:
    """Join neighbouring blocks that are wholly indented: an equation block with a gap in it."""
    joined: list[str] = []
    for block in blocks:
        if joined and _is_indented(block) and _is_indented(joined[-1]):
            joined[-1] += "\n\n" + block
        else:
            joined.append(block)
    return joined


def _is_indented(block: str) -> bool:
    return all(line.startswith("    ") for line in block.splitlines() if line)


def _block(lines: list[str]) -> str:
    aligned = any(re.search(r"\S {3,}\S", line) for line in lines if not line.startswith("  "))
    if aligned and len(lines) > 1:
        return _fenced(lines)
    parts = []
    for indented, run in groupby(lines, key=lambda line: line.startswith("    ") or not line):
        part = list(run)
        parts.append(_fenced(part) if indented else _paragraph(part))
    return "\n\n".join(parts)


def _fenced(lines: list[str]) -> str:
    return "```text\n" + inspect.cleandoc("\n" + "\n".join(lines)) + "\n```"


def _paragraph(lines: list[str]) -> str:
    """Return lines of prose; a list begins with the first of them, or after a colon."""
    shown: list[str] = []
    listing = True
    for line in lines:
        item = _LIST.match(line)
        listing = listing and (item is not None or line.startswith("  "))
        if listing and item:
            shown.append(item[0] + escape(line[item.end() :], leading=False))
        else:
            shown.append(escape(line, leading=not listing))
        if not listing and line.endswith(":"):
            listing = True
            shown.append("")
    return "\n".join(shown).rstrip()


def escape(line: str, leading: bool = True) -> str:
    """Return a line of plain text so that Markdown shows every character of it.

    Args:
        line: may hold ``code`` and URLs, which are left alone.
        leading: whether it stands where a sign at its beginning would make a list or a heading.
    """
    line = re.sub(r":[a-z]+:`([^`]+)`", r"`\1`", line)  # Sphinx's roles
    pieces = re.split(r"(``.+?``|`[^`]+`|https?://\S+)", line)
    plain = "".join(piece if index % 2 else _escape(piece) for index, piece in enumerate(pieces))
    if not leading:
        return plain
    plain = re.sub(r"^(\s*)([-+=#>])", r"\1\\\2", plain)
    return re.sub(r"^(\s*\d+)([.)]\s)", r"\1\\\2", plain)


def _escape(text: str) -> str:
    text = re.sub(r"([*\\])", r"\\\1", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return re.sub(r"<(?=[A-Za-z/!])", r"\\<", text)


def cell(text: str) -> str:
    """Return Markdown for a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def first_sentence(docstring: str | None) -> str:
    """Return a docstring's first paragraph in one line."""
    first = inspect.cleandoc(docstring or "").split("\n\n")[0]
    return " ".join(first.split())


def url_after(text: str, word: str) -> str:
    """Return the first URL of a text after a word; empty if there is none."""
    found = _URL.search(text, text.find(word)) if word in text else None
    return found[0].rstrip(".") if found else ""
