"""Equations of a ``math`` block as MathML, which browsers render without a script or a font."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latex2mathml.converter import convert


def block(source: str, *_: Any, **__: Mapping[str, Any]) -> str:
    """Return a fenced block of LaTeX, one equation a line, as HTML (SuperFences calls it)."""
    lines = [line for line in source.splitlines() if line.strip()]
    equations = "".join(convert(line, display="block") for line in lines)
    return f'<div class="equations" role="group" tabindex="0">{equations}</div>'
