"""From an encoded image to an array. Imported only where something has to be decoded."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MODES = {1: "L", 3: "RGB"}


def decode_image(source: bytes | Path, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return pixels (C, H, W); an image of another size is scaled, of other colours converted."""
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return fit_image(image, shape)


def fit_image(image: Image.Image, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return pixels (C, H, W) of an open image, scaled and converted where needed."""
    channels, height, width = shape
    converted = image.convert(MODES[channels])
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(converted, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
