"""Choosing the device that a model trains on."""

from __future__ import annotations

import torch

from common.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA where there is one.

    Raises:
        ConfigError: if torch knows no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device={name} is unknown; allowed: auto, cpu, cuda, or one GPU such as cuda:1"
        ) from None
