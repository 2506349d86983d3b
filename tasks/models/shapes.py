"""The images that the convolutional networks take."""

from __future__ import annotations

from common.errors import ConfigError

Shape = tuple[int, int, int]  # (C, H, W)


def require_size(name: str, input_shape: Shape, least: int) -> None:
    """Refuse images of which nothing would be left.

    Raises:
        ConfigError: where the height or the width is less than ``least`` pixels.
    """
    height, width = input_shape[1:]
    if min(height, width) < least:
        raise ConfigError(
            f"task.model={name} needs images of at least {least}x{least} pixels and these are "
            f"{height}x{width}: choose another task.model (mlp, resnet8) or task.image_size"
        )
