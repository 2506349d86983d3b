"""Hydra's configuration as plain values."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


def plain(node: Any) -> dict[str, Any]:
    """Return a node of Hydra's configuration as plain, resolved values."""
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
