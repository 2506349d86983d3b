"""Texts as sequences of tokens, on a device.

A token is a number, as in Keras' IMDB: 0 pads, 1 starts a text, 2 is every word that the vocabulary
has not, and from 3 on come the vocabulary's words by rank. (Keras leaves 3 out and begins at 4.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PADDING, START, UNKNOWN = range(3)
SPECIAL_TOKENS = 3  # and the token of the first word


@dataclass(frozen=True)
class TokenTransform:
    """Texts are not augmented and have no memory format."""

    @property
    def augments(self) -> bool:
        """False."""
        return False

    def place(
        self, raw: NDArray[np.signedinteger], device: torch.device, *, channels_last: bool
    ) -> PlacedTokens:
        """Return tokens (n, T) on the device."""
        return PlacedTokens(torch.from_numpy(np.array(raw)).to(device))

    def module(self) -> nn.Module:
        """Return a layer that does nothing: tokens are the inputs."""
        return nn.Identity()


@dataclass(frozen=True)
class PlacedTokens:
    """Tokens of any integer type, (n, T), and the inputs that they give."""

    tokens: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens."""
        return self.tokens.numel() * self.tokens.element_size()

    def batches(
        self, order: Tensor, batch_size: int, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Yield tokens (B, T), int64."""
        for chosen in torch.split(order, batch_size):
            yield self.tokens[chosen].long()
