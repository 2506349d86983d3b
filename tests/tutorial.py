"""docs/tutorial.md as one script, since a reader has one terminal, too.

A fenced block is one of three: a file, which has a title="path"; commands, which are bash without a
title; or text, which the commands above it print, shortened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"
FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?$')
MARKER = "@@@ block at line "


@dataclass(frozen=True)
class Block:
    """A fenced block: its line in the file, language, title and content."""

    line: int
    language: str
    title: str | None
    content: str


def blocks() -> list[Block]:
    """Return the fenced blocks of the tutorial."""
    found: list[Block] = []
    lines = iter(enumerate(TUTORIAL.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        if not line.startswith("```"):
            continue
        fence = FENCE.match(line)
        assert fence, f"line {number}: {line!r} is neither commands, a file, nor output"
        content = []
        for _, inner in lines:
            if inner == "```":
                break
            content.append(inner + "\n")
        found.append(Block(number, fence["language"], fence["title"], "".join(content)))
    return found


def script_of(blocks: Sequence[Block]) -> str:
    """Return the reader's doing as one script that stops at the first command that fails."""
    parts = ["set -eo pipefail\n"]
    for block in blocks:
        if block.title:
            end = f"END_OF_{block.line}"
            parts.append(f"cat > \"{block.title}\" <<'{end}'\n{block.content}{end}\n")
        elif block.language == "bash":
            parts.append(f"echo; echo '{MARKER}{block.line}'\n{block.content}")
    return "".join(parts)


def printed_by_block(printed: str, home: Path) -> dict[int, str]:
    """Return what the script printed by the line of the block; 0: before the first."""
    text = printed.replace(str(home), "~")
    first, *rest = text.split(f"\n{MARKER}")
    parts = [part.partition("\n") for part in rest]
    return {0: first} | {int(line): printed for line, _, printed in parts}


def gist(line: str) -> str:
    """Return a line without what differs from run to run: numbers, hashes, colours, widths."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"\b[0-9a-f]{32,}\b|\d[\d.,:]*", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"[─━│╭╮╰╯┃]+", " ", line)).strip()
