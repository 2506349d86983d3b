"""Choosing the device that a model trains on."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
