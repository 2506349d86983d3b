"""Writes a page as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.report.blocks import Block, Entry, Heading, Listing, Paragraph, Picture, Table, Warn


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the page as Markdown; its pictures are PNG files beside it."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Warn(text):
            return f"> **Note:** {_plain(text)}"
        case Listing(items, True):
            return "\n".join(["```", *items, "```"])
        case Listing(items, _):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Picture(name=name, caption=caption):
            return f"![{name}]({name}.png)\n\n{_plain(caption)}"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    alignment = ["---" if n < table.words else "---:" for n in range(len(table.head))]
    lines = [_row([_cell(Entry(name)) for name in table.head]), _row(alignment)]
    lines += [_row([_cell(entry) for entry in row]) for row in table.rows]
    if table.caption:
        lines += ["", _plain(table.caption)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(entry: Entry) -> str:
    text, under = (_plain(part).replace("|", "\\|") for part in (entry.text, entry.under))
    return f"{text}<br>{under}" if under else text


def _plain(text: str) -> str:
    """Escape Markdown's marks in plain text; ``> 30`` in a table needs no escape."""
    for mark in ("\\", "`", "*", "<"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
