"""Nested mappings, such as recipes, as paths and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values below mappings and their dotted keys; lists are values."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flat(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by their dotted keys; empty mappings are dropped."""
    return {key: value for key, value in leaves(node) if not isinstance(value, Mapping)}
