"""Segmentation: a small U-Net, folders of images and masks, and a toy data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedhet.common.errors import (
    ConfigError,
    SetupError,
    require_range,
    require_whole,
)
from fedhet.tasks.examples import IGNORED
from fedhet.tasks.sources.arrays import random_split
from fedhet.tasks.sources.encodings import ImageEncoding, read_image
from fedhet.tasks.sources.images import images_in, warn_of_others

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]
Pair = tuple[Tensor, Tensor]

_KEY = "task.data_options"
_LOSSY = (".jpg", ".jpeg", ".jfif", ".webp")


class UNet(nn.Module):
    """A small U-Net: images (B, channels, H, W) to logits (B, num_classes, H, W).

    Ronneberger, Fischer, Brox: U-Net: Convolutional Networks for Biomedical Image Segmentation,
    MICCAI 2015, https://arxiv.org/abs/1505.04597. Two things differ from the paper: images are
    padded, so that the output has their size, and layers are normalised by GroupNorm, which has no
    statistics to average. The classifier is the last convolution, 1x1.

    Args:
        num_classes: C, the background included.
        input_shape: (channels, H, W); only the channels matter.
        width: channels of the first level; each level below has twice as many.
        depth: how often the image is halved.
    """

    def __init__(
        self, num_classes: int, input_shape: Sequence[int], width: int = 16, depth: int = 2
    ) -> None:
        super().__init__()
        require_whole("task.model_options.width", width, low=1)
        require_whole("task.model_options.depth", depth, low=1)
        widths = [width * 2**level for level in range(depth + 1)]
        inputs = [input_shape[0], *widths]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip(inputs, widths, strict=False))
        self.up = nn.ModuleList(_block(3 * wide, wide) for wide in reversed(widths[:-1]))
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C, H, W)."""
        levels: list[Tensor] = []
        values = images
        for number, block in enumerate(self.down):
            values = block(values if number == 0 else F.max_pool2d(values, 2, ceil_mode=True))
            levels.append(values)
        for block, level in zip(self.up, reversed(levels[:-1]), strict=True):
            larger = F.interpolate(values, size=level.shape[-2:], mode="nearest")
            values = block(torch.cat([larger, level], dim=1))
        logits: Tensor = self.classifier(values)
        return logits


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers.append(nn.Conv2d(width, outputs, 3, padding=1, bias=False))
        layers += [nn.GroupNorm(1, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------- data
def load(
    *,
    path: str | None = None,
    image_size: int = 64,
    channels: int = 3,
    test_fraction: float = 0.2,
    ignore_index: int | None = None,
    data_folder: Path | None = None,
) -> tuple[MaskedImages | Arrays, MaskedImages | None]:
    """Return training and test images of a folder, and their masks.

    Args:
        path: folder with train/images, train/masks and, if there are any, test/images and
            test/masks; an image and its mask have the same name, whatever their endings, and the
            same size. A mask's pixel is its label. Masks must not be JPEGs, which change pixels.
        image_size: width and height in pixels that images and masks are scaled to.
        channels: 3: colour, 1: grey.
        test_fraction: share of the training images to test on (always the same ones) if there is
            no test folder.
        ignore_index: pixels with this label, often 255, count in no loss and no metric.
        data_folder: a site's folder (``partition=site``), in place of ``path``; the server has none
            and gets no image.

    Raises:
        ConfigError: for a missing folder or mask, or two images with one name; when it is read, for
            a file that is damaged, and for a mask with colours or of another size than its image.
    """
    require_whole(f"{_KEY}.image_size", image_size, low=1)
    require_range(f"{_KEY}.test_fraction", test_fraction, high=1.0, open_high=True)
    if ignore_index is not None:
        require_whole(f"{_KEY}.ignore_index", ignore_index, low=0)
    if channels not in (1, 3):
        raise ConfigError(f"{_KEY}.channels={channels} must be 1 (grey) or 3 (colour)")
    if path is None and data_folder is None:
        shape = (0, image_size, image_size)
        none = np.zeros((0, channels, *shape[1:]), dtype=np.float32)
        return (none, np.zeros(shape, dtype=np.int64)), None
    folder = data_folder or Path(str(path)).expanduser()
    train = MaskedImages(folder / "train", image_size, channels, ignore_index)
    if (folder / "test").is_dir():
        return train, MaskedImages(folder / "test", image_size, channels, ignore_index)
    if data_folder is not None:
        return train, None  # partition.holdout holds out some
    kept, split_off = random_split(len(train), test_fraction)
    return train.select(kept), train.select(split_off)


class MaskedImages(Dataset[Pair]):
    """Images (channels, H, W) in [0, 1] and masks (H, W) of a folder, read one by one.

    Args:
        folder: folder with images/ and masks/.
        image_size: H = W.
        channels: 3 or 1.
        ignore_index: the label that becomes ``IGNORED``; None: no label does.
    """

    def __init__(
        self, folder: Path, image_size: int, channels: int, ignore_index: int | None = None
    ) -> None:
        masks = _pictures(folder / "masks")
        if lossy := [path for path in masks.values() if path.suffix.lower() in _LOSSY]:
            raise ConfigError(
                f"{lossy[0]}: JPEG and WebP may change pixels, and so labels: save masks as PNG"
            )
        images = _pictures(folder / "images")
        if without := sorted(images.keys() - masks.keys()):
            raise ConfigError(f"{folder / 'masks'} has no mask of {', '.join(without[:3])}")
        if without := sorted(masks.keys() - images.keys()):
            raise ConfigError(f"{folder / 'images'} has no image of {', '.join(without[:3])}")
        self._paths = [(images[name], masks[name]) for name in sorted(images)]
        self._encoding = ImageEncoding((channels, image_size, image_size))
        self._ignore_index = ignore_index

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._paths)

    def __getitem__(self, row: int) -> Pair:
        """Return an image and its mask."""
        from PIL.Image import Resampling

        image_path, mask_path = self._paths[row]
        image, mask = read_image(image_path, image_path), read_image(mask_path, mask_path)
        if image.size != mask.size:
            raise ConfigError(
                f"{mask_path} has {mask.width}x{mask.height} pixels, but its image "
                f"{image_path.name} {image.width}x{image.height}: both must have the same size"
            )
        pixels = self._encoding.fit(image, image_path).astype(np.float32) / 255
        labels = np.asarray(mask.resize(self._encoding.shape[:0:-1], Resampling.NEAREST))
        if labels.ndim != 2 or (labels % 1).any():
            raise ConfigError(f"{mask_path} has colours or fractions: a pixel must be its label")
        labels = labels.astype(np.int64)
        if self._ignore_index is not None:
            labels[labels == self._ignore_index] = IGNORED
        return torch.from_numpy(pixels), torch.from_numpy(labels)

    def select(self, rows: NDArray[Any]) -> MaskedImages:
        """Return some of the images."""
        chosen = object.__new__(MaskedImages)
        chosen.__dict__ |= {**self.__dict__, "_paths": [self._paths[row] for row in rows]}
        return chosen


def _pictures(folder: Path) -> dict[str, Path]:
    """Return the pictures of a folder by name without its ending."""
    if not folder.is_dir():
        raise SetupError(f"{folder} is not a folder: change task.path or the data-folder")
    found: dict[str, Path] = {}
    pictures, others = images_in(folder)
    warn_of_others(folder, others)
    for path in pictures:
        if found.setdefault(path.stem, path) != path:
            raise ConfigError(
                f"{folder} has {found[path.stem].name} and {path.name}: the name without ending "
                "must be unique, because it connects an image with its mask; rename one of them"
            )
    return found


def shapes(
    seed: int, examples: int = 300, test_examples: int = 100, size: int = 24, noise: float = 0.3
) -> tuple[Arrays, Arrays]:
    """Return training and test images (n, 1, H, W) of a disc and a square, and masks (n, H, W).

    A toy: grey shapes on a noisy background; 0 is the background, 1 the disc, 2 the square, which
    covers the disc where they meet.

    Args:
        seed: seed of the drawing; the test images are the same for every seed.
        examples: number of training examples.
        test_examples: number of test examples.
        size: H = W.
        noise: standard deviation of the Gaussian noise; the shapes are 0.5 and 1 brighter than the
            background.
    """
    require_whole(f"{_KEY}.examples", examples, low=1)
    require_whole(f"{_KEY}.test_examples", test_examples)
    require_range(f"{_KEY}.noise", noise, open_high=True)
    require_whole(f"{_KEY}.size", size, low=8)
    return _draw([seed, 1], examples, size, noise), _draw([0, 0], test_examples, size, noise)


def _draw(seed: list[int], count: int, size: int, noise: float) -> Arrays:
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0, size, (2, 2, count, 1, 1))  # shape, axis
    reach = rng.uniform(size / 8, size / 4, (2, count, 1, 1))
    down, right = np.mgrid[:size, :size]
    offsets = np.stack([down, right])[None, :, None] - centres
    masks = np.zeros((count, size, size), dtype=np.int64)
    masks[np.hypot(*offsets[0]) <= reach[0]] = 1
    masks[np.abs(offsets[1]).max(axis=0) <= reach[1]] = 2
    images = masks / 2 + rng.normal(0, noise, masks.shape)
    return images[:, None].astype(np.float32), masks
