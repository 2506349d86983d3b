"""Docstrings and tables as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

_LIST = re.compile(r"([-*]|\d+[.)]) ")
_URL = re.compile(r"https?://[^\s)>,]+")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: equations (indented or aligned text) stay as they are."""
    shown: list[str] = []
    fenced = False
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.splitlines()
        aligned = len(lines) > 1 and any(re.search(r"\S {3,}\S", line) for line in lines)
        code = [aligned or line.startswith("    ") for line in lines]
        if fenced and code[0]:
            shown.append("")
        for line, is_code in zip(lines, code, strict=True):
            if is_code != fenced:
                shown += ["", "```text"] if is_code else ["```", ""]
                fenced = is_code
            elif line is lines[0] and not is_code:
                shown.append("")
            shown.append(line.removeprefix("    ") if is_code else escape(line))
    text = "\n".join([*shown, *(["```"] if fenced else [])])
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def escape(line: str) -> str:
    """Return a line so that Markdown shows every character; ``code`` and URLs are left alone."""
    line = re.sub(r":[a-z]+:`([^`]+)`", r"`\1`", line)  # Sphinx's roles
    item = _LIST.match(line)
    start = item[0] if item else ""
    pieces = re.split(r"(``.+?``|`[^`]+`|https?://\S+)", line.removeprefix(start))
    for index in range(0, len(pieces), 2):
        text = re.sub(r"([*\\])", r"\\\1", pieces[index])
        text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
        pieces[index] = re.sub(r"<(?=[A-Za-z/!])", r"\\<", text)
    return start + "".join(pieces)


def first_sentence(docstring: str | None) -> str:
    """Return a docstring's first paragraph in one line."""
    return " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())


def url_after(text: str, word: str) -> str:
    """Return the first URL of a text after a word; empty if there is none."""
    found = _URL.search(text, text.find(word)) if word in text else None
    return found[0].rstrip(".") if found else ""
