"""A shift of the clients' images: each client has a camera of its own (partition=feature_shift).

Clients hold the same classes in the same shares, and their pixels differ: brightness, contrast,
noise and rotation are drawn once for each client, uniformly up to the partition's four keys. With
u_1 to u_4 uniform in [-1, 1], drawn for a client, a pixel p in [0, 1] becomes

    R(rotation u_4) applied to   1/2 + (p - 1/2) e^(contrast u_2) + brightness u_1 + noise |u_3| e

cut off to [0, 1]; e is standard normal, drawn once for each number of each image, and R turns the
image about its centre (bilinear; what comes from outside is black). Training and held-out examples
are shifted, the global test set is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_STREAM = 0xF5  # keeps the draws independent of every other use of the seed
_AT_ONCE = 1000  # images
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class FeatureShift:
    """What happens to one client's images.

    Attributes:
        brightness: that is added, of pixels in [0, 1].
        contrast: by which distances from grey are multiplied.
        noise: standard deviation.
        rotation: in degrees.
        seed: of the noise.
    """

    brightness: float
    contrast: float
    noise: float
    rotation: float
    seed: tuple[int, ...]

    @classmethod
    def of_client(cls, options: Mapping[str, Any], seed: int, client_id: int) -> FeatureShift:
        """Draw a client's shift, up to the options' sizes."""
        drawn = np.random.default_rng([_STREAM, seed, client_id]).uniform(-1.0, 1.0, 4).tolist()
        return cls(
            brightness=options["brightness"] * drawn[0],
            contrast=float(np.exp(options["contrast"] * drawn[1])),
            noise=options["noise"] * abs(drawn[2]),
            rotation=options["rotation"] * drawn[3],
            seed=(_STREAM, seed, client_id),
        )

    def __call__(self, pixels: Pixels, part: int) -> Pixels:
        """Return the client's images (n, C, H, W); ``part`` 0 is what it trains on, 1 held out."""
        rng = np.random.default_rng([*self.seed, 1 + part])
        blocks = range(0, len(pixels), _AT_ONCE)
        found = [self._shifted(pixels[start : start + _AT_ONCE], rng) for start in blocks]
        return np.concatenate(found) if found else pixels

    def _shifted(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        values = torch.from_numpy(np.array(pixels)).float() / 255
        values = 0.5 + (values - 0.5) * self.contrast + self.brightness
        if self.noise > 0.0:
            drawn = rng.standard_normal(tuple(values.shape), dtype=np.float32)
            values += self.noise * torch.from_numpy(drawn)
        values = values.clamp(0.0, 1.0)
        return (_turned(values, self.rotation) * 255).round().to(torch.uint8).numpy()


def _turned(images: Tensor, degrees: float) -> Tensor:
    """Return images (n, C, H, W) turned about their centres."""
    if degrees == 0.0:
        return images
    height, width = images.shape[-2:]
    angle = torch.tensor(degrees).deg2rad()
    sine, cosine = angle.sin(), angle.cos()
    # affine_grid counts in half sides, which differ where the image is no square
    rows = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    theta = torch.tensor(rows).expand(len(images), 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).clamp(0.0, 1.0)
