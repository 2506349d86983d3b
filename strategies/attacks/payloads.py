"""Lies in what a method's clients send beside the update, which is honest.

control_variate_lie     c_i+ - c_i of SCAFFOLD and FedPVR, times a factor
soft_label_lie          the sums of soft labels by class (FedDW, FedDistill+): each class's
                        probabilities go to the next class
projection_lie          MA-Echo's projections times a factor; beyond 1 the server refuses them
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Text, Whole
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import Payloads, Reply


class PayloadLie(Attack):
    """Sends a payload's tensors scaled, and their last dimension rolled."""

    variants = MappingProxyType(
        {
            "control_variate_lie": {"payload": "control_variate_delta", "factor": -10.0},
            "projection_lie": {"payload": "projections", "factor": 0.0},
            "soft_label_lie": {"payload": "soft_label_sums", "roll": 1},
        }
    )

    payload: Text
    """name of the payload"""
    factor: float = 1.0
    """factor on all its numbers"""
    roll: Whole = 0
    """places by which its matrices are rolled along their last dimension"""

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
