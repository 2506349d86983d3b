"""Encodings of examples as arrays: images as pixels, texts as tokens."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.text_files import require_file
from fedhet.tasks.vocabulary import Vocabulary

if TYPE_CHECKING:  # imported only to decode: it is slow
    from PIL import Image

MODES = {1: "L", 3: "RGB"}


# What "image" means, wherever one is opened: Pillow would hand an EPS file to Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def read_image(source: bytes | Path, place: object) -> Image.Image:
    """Return an image, turned as its EXIF orientation says.

    Args:
        source: the encoded image, or its file.
        place: where it is, for errors.

    Raises:
        ConfigError: if it is no file, or damaged, or of no format of FORMATS.
    """
    from PIL import Image, ImageOps

    if isinstance(source, Path):
        require_file(source, "the data")
    opened = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(opened, formats=FORMATS) as image:
            return ImageOps.exif_transpose(image)
    except Exception as error:  # each of Pillow's decoders raises its own
        why = f"its format is not {', '.join(FORMATS)}" if _unknown(error) else error
        raise DamagedFileError(f"{place} cannot be read as an image: {why}") from None


def _unknown(error: Exception) -> bool:
    from PIL import UnidentifiedImageError

    return isinstance(error, UnidentifiedImageError)


def in_bytes(image: Image.Image, channels: int, place: object) -> Image.Image:
    """Return an image as grey (1 channel) or colour (3), with a byte per channel.

    Args:
        image: an open image.
        channels: 1 or 3.
        place: the image's place, for the error.

    Raises:
        ConfigError: if pixels have more than a byte, such as 16-bit grey. Pillow would cut them off
            at 255, and nobody knows which value is white.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise ConfigError(
            f"{place}: a pixel has more than 8 bits (Pillow's mode {image.mode}), but fedhet reads "
            "0 to 255: scale the image to that, or read it by your own function (task=own)"
        )
    return image.convert(MODES[channels])


def image_in(value: Mapping[str, Any]) -> bytes | Path:
    """Return the image of a table's struct of bytes and path."""
    return value["bytes"] if value["bytes"] is not None else Path(value["path"])


@dataclass(frozen=True)
class ImageEncoding:
    """Images as pixels, uint8.

    Attributes:
        shape: (C, H, W). Images are turned as their EXIF orientation says, and scaled and converted
            if their size or mode differs.
    """

    shape: tuple[int, int, int]

    kind = "images"  # names the cache's folder and file
    dtype = np.uint8

    @property
    def identity(self) -> dict[str, object]:
        """All that the arrays depend on beside the source."""
        return {"shape": list(self.shape)}

    def encode(self, value: Any) -> NDArray[np.uint8]:
        """Return the pixels of an image in a table, which is a struct of bytes and path."""
        return self.decode(image_in(value))

    def decode(self, source: bytes | Path, place: object = "an image") -> NDArray[np.uint8]:
        """Return the pixels of an encoded image; ``place`` says in errors where it is."""
        return self.fit(read_image(source, place), place)

    def fit(self, image: Image.Image, place: object = "an image") -> NDArray[np.uint8]:
        """Return the pixels of an open image."""
        channels, height, width = self.shape
        converted = in_bytes(image, channels, place)
        if converted.size != (width, height):
            from PIL.Image import Resampling

            converted = converted.resize((width, height), Resampling.BILINEAR)
        pixels = np.asarray(converted, dtype=np.uint8)
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


@dataclass(frozen=True)
class TokenEncoding:
    """Texts as tokens.

    Attributes:
        vocabulary: numbers the words.
        length: T, the number of tokens of every text.
    """

    vocabulary: Vocabulary
    length: int

    kind = "tokens"  # names the cache's folder and file

    @property
    def shape(self) -> tuple[int]:
        """(T,)."""
        return (self.length,)

    @property
    def dtype(self) -> type[np.integer]:
        """The smallest type that holds every token."""
        return np.int16 if self.vocabulary.num_tokens <= 2**15 else np.int32

    @property
    def identity(self) -> dict[str, object]:
        """All that the arrays depend on beside the source."""
        return {"vocabulary": self.vocabulary.digest, "length": self.length}

    def encode(self, value: Any) -> NDArray[np.signedinteger]:
        """Return the tokens of a text, padded or cut at its end."""
        tokens = np.zeros(self.length, self.dtype)
        known = self.vocabulary.tokens(value, self.length)
        tokens[: len(known)] = known
        return tokens


Encoding = ImageEncoding | TokenEncoding
