"""Lies in what a method's clients send beside the update, which is honest.

control_variate_lie     c_i+ - c_i of SCAFFOLD and FedPVR, times a factor
soft_label_lie          the sums of soft labels by class (FedDW, FedDistill+): each class's
                        probabilities go to the next class
projection_lie          MA-Echo's projections times a factor; beyond 1 the server refuses them
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedhet.common.errors import ConfigError, require_range, require_whole
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import Payloads, Reply


@dataclass(kw_only=True, eq=False)
class PayloadLie(Attack):
    """Sends a payload's tensors scaled, and their last dimension rolled.

    Attributes:
        payload: its name.
        factor: of all its numbers.
        roll: by how many places tensors of two or more dimensions are rolled along the last.
    """

    payload: str
    factor: float = 1.0
    roll: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_range("attack.factor", self.factor, low=float("-inf"))
        require_whole("attack.roll", self.roll)

    def check_method(self, payloads: Collection[str], *, num_classes: int) -> None:
        """Refuse a method that does not have the payload."""
        super().check_method(payloads, num_classes=num_classes)
        if self.payload not in payloads:
            raise ConfigError(
                f"attack.payload={self.payload} is none that the clients of this method send; "
                f"they send: {', '.join(sorted(payloads)) or 'none'}"
            )

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        lie = {name: self._changed(value) for name, value in reply.payloads[self.payload].items()}
        return replace(reply, payloads={**reply.payloads, self.payload: lie})

    def _changed(self, value: Tensor) -> Tensor:
        return self.factor * (torch.roll(value, self.roll, -1) if value.dim() > 1 else value)
