"""Writes a page as one HTML file with style and pictures inside; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from fedhet.report.blocks import Block, Entry, Heading, Listing, Paragraph, Picture, Table, Warn
from fedhet.report.colors import PALETTE, THEME

SHORT_LABEL = 22  # letters; a longer label of a row may wrap


def to_html(blocks: Sequence[Block]) -> str:
    """Return the page."""
    title = next((b.text for b in blocks if isinstance(b, Heading) and b.level == 1), "Report")
    style = _colors() + files("fedhet.report").joinpath("page.css").read_text("utf-8")
    body = "\n".join(_block(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _colors() -> str:
    """Return the pictures' colours as CSS variables, for a light and a dark page."""
    pairs = THEME | {f"line-{number}": pair for number, pair in enumerate(PALETTE)}
    light = " ".join(f"--{name}: {pair.light};" for name, pair in pairs.items())
    dark = " ".join(f"--{name}: {pair.dark};" for name, pair in pairs.items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Warn(text):
            return f'<p class="warn">{escape(text)}</p>'
        case Listing(items, True):
            return "\n".join(f"<pre><code>{escape(item)}</code></pre>" for item in items)
        case Listing(items, _):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Picture(svg, caption, name, themed):
            kind = "frame" if themed else "frame card"
            return (
                f'<figure><div class="{kind}" tabindex="0" role="img" aria-label="{escape(name)}">'
                f"{svg}</div><figcaption>{escape(caption)}</figcaption></figure>"
            )
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_kind(number, table)}>{escape(name)}</th>'
        for number, name in enumerate(table.head)
    )
    rows = "\n".join(_row(row, table) for row in table.rows)
    caption = f"<figcaption>{escape(table.caption)}</figcaption>" if table.caption else ""
    # A wide table scrolls in its own frame, also by keyboard.
    return (
        f'<figure><div class="frame" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>{caption}</figure>"
    )


def _row(row: Sequence[Entry], table: Table) -> str:
    first, *others = row
    cells = "".join(
        f"<td{_kind(number, table)}>{_entry(entry)}</td>" for number, entry in enumerate(others, 1)
    )
    kind = ' class="short"' if len(first.text) <= SHORT_LABEL else ""
    return f'<tr><th scope="row"{kind}>{_entry(first)}</th>{cells}</tr>'


def _kind(number: int, table: Table) -> str:
    return "" if number < table.words else ' class="number"'


def _entry(entry: Entry) -> str:
    under = f"<small>{escape(entry.under)}</small>" if entry.under else ""
    return escape(entry.text) + under
