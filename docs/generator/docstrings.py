"""Docstrings for mkdocstrings: Sphinx's roles become code, as elsewhere in the pages."""

from __future__ import annotations

import re
from typing import Any

import griffe


class PlainRoles(griffe.Extension):
    """Replaces :class:`Name` by `Name`, which Markdown shows as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Edit an object's docstring."""
        if obj.docstring is not None:
            text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"``([^`]+)``", r"`\1`", text)
