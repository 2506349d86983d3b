"""How examples become arrays: images pixels, texts tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.sources.vocabulary import Vocabulary


@dataclass(frozen=True)
class ImageEncoding:
    """Pixels.

    Attributes:
        shape: (C, H, W) that the images are brought to.
    """

    shape: tuple[int, int, int]

    kind = "images"
    dtype = np.uint8

    @property
    def identity(self) -> dict[str, object]:
        """The shape."""
        return {"shape": list(self.shape)}

    def encode(self, value: Any) -> NDArray[np.uint8]:
        """Return the pixels of an image as tables have it, a struct of bytes and path."""
        from tasks.sources.pixels import decode_image

        encoded = value["bytes"] if value["bytes"] is not None else Path(value["path"])
        return decode_image(encoded, self.shape)


@dataclass(frozen=True)
class TokenEncoding:
    """Tokens.

    Attributes:
        vocabulary: numbers the words.
        length: T, the number of tokens of every text.
    """

    vocabulary: Vocabulary
    length: int

    kind = "tokens"

    @property
    def shape(self) -> tuple[int]:
        """(T,)."""
        return (self.length,)

    @property
    def dtype(self) -> type[np.integer]:
        """The smaller one that holds every token."""
        return np.int16 if self.vocabulary.num_tokens <= 2**15 else np.int32

    @property
    def identity(self) -> dict[str, object]:
        """The vocabulary and the length."""
        return {"vocabulary": self.vocabulary.digest, "length": self.length}

    def encode(self, value: Any) -> NDArray[np.signedinteger]:
        """Return the tokens of a text, padded and cut at its end."""
        tokens = np.zeros(self.length, self.dtype)
        known = self.vocabulary.tokens(value, self.length)
        tokens[: len(known)] = known
        return tokens
