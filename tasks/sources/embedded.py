"""scikit-learn's handwritten digits: 1,797 images of 8x8 pixels that need no download."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tasks.sources.arrays import Record
from tasks.sources.encodings import ImageEncoding


@dataclass(frozen=True)
class DigitsDecoder:
    """The digits, cached like the rest: importing scikit-learn takes a second."""

    encoding: ImageEncoding

    @property
    def identity(self) -> dict[str, object]:
        """The version of what holds the images."""
        version = importlib.metadata.version("scikit-learn")
        return {"scikit-learn": version, **self.encoding.identity}

    def count(self) -> int:
        """Return the number of examples."""
        return 1797

    def records(self) -> Iterator[Record]:
        """Yield the examples; their 17 shades of grey become 0..255."""
        from PIL import Image
        from sklearn.datasets import load_digits

        from tasks.sources.pixels import fit_image

        digits = load_digits()
        shades = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for pixels, label in zip(shades, digits.target, strict=True):
            yield Record(fit_image(Image.fromarray(pixels), self.encoding.shape), int(label))
