"""How long and how a client trains: checked at the server before round 1, used at the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from strategies.base import ConfigError, require_range


@dataclass(frozen=True)
class LocalOptions:
    """How long and how a client trains.

    Attributes:
        batch_size: examples per mini-batch.
        epochs: passes over the client's data; None when ``steps`` is given.
        steps: optimiser steps; None when ``epochs`` is given.
        drop_last: leave out a last, smaller batch (FedPVR's released loaders do).
        clip: maximum L2 norm of the corrected gradient; None does not clip.
        autocast: compute the forward pass in bfloat16.
    """

    batch_size: int = 32
    epochs: int | None = 1
    steps: int | None = None
    drop_last: bool = False
    clip: float | None = None
    autocast: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range("local.batch_size", self.batch_size, low=1)
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"local.epochs={self.epochs} and local.steps={self.steps}: give exactly one, and "
                "set the other to null"
            )
        require_range("local.epochs", self.epochs or 1, low=1)
        require_range("local.steps", self.steps or 1, low=1)
        if self.clip is not None:
            require_range("local.clip", self.clip, open_low=True)


def local_options(local: Mapping[str, Any]) -> LocalOptions:
    """Return the options that the recipe's ``local`` holds, checked."""
    return LocalOptions(**{field.name: local[field.name] for field in fields(LocalOptions)})
