"""Writes a page as HTML or Markdown, by the Jinja2 templates beside this file.

Text from runs is escaped by the templates. The HTML page is one file: style, script, Vega and
pictures are in it, so that it can be mailed, and read without a network. Its content security
policy allows nothing but its own two scripts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedhet.report.blocks import Block, Heading, can_draw
from fedhet.report.colors import CHROME, PAGE, PALETTE


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the page as Markdown; its pictures are PNG files beside it."""
    text = _environment().get_template("page.md").render(blocks=blocks)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_html(blocks: Sequence[Block], *, live: str = "") -> str:
    """Return the page; ``live`` is the version of one that a server keeps up to date."""
    environment = _environment()
    script = environment.get_template("page.js").render(dark=dict((*CHROME, *PALETTE, PAGE)))
    vega = "" if live else vega_script()  # a server sends it apart
    scripts = [script] if live else [script, vega]
    allowed = " ".join(f"'sha256-{_sha256(text)}'" for text in scripts)
    return environment.get_template("page.html").render(
        blocks=blocks,
        anchors=_anchors(blocks),
        title=next((b.text for b in blocks if isinstance(b, Heading) and b.level == 1), "Report"),
        style=environment.get_template("page.css").render(page=PAGE),
        script=script,
        vega=vega,
        allowed=f"{allowed} 'self'" if live else allowed,
        live=live,
    )


@lru_cache
def vega_script() -> str:
    """Return the JavaScript of Vega-Lite, 0.9 MB; empty if the extra `plots` is not installed."""
    if not can_draw():
        return ""
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return f"(() => {{{bundle}}})();".replace("</script", r"<\/script")


@lru_cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedhet.report", "templates"),
        autoescape=lambda name: bool(name) and str(name).endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": _plain, "image": _image}
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    return environment


def _anchors(blocks: Sequence[Block]) -> Mapping[int, str]:
    """Return the fragment of each heading by the block's number; each is there once."""
    found: dict[int, str] = {}
    for number, block in enumerate(blocks):
        if isinstance(block, Heading) and block.level > 1:
            name = re.sub(r"[^a-z0-9]+", "-", block.text.casefold()).strip("-") or "part"
            found[number] = f"{name}-{number}" if name in found.values() else name
    return found


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _image(svg: str) -> str:
    """Return an SVG as the address of an image, in which no script runs."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _plain(text: Any) -> str:
    """Escape Markdown's marks in plain text; ``> 30`` in a table needs no escape."""
    found = str(text)
    for mark in ("\\", "`", "*", "<", "|"):
        found = found.replace(mark, f"\\{mark}")
    return " ".join(found.split())
