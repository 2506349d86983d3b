"""The inputs of a task's model for a black and a white pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.tasks.config import OwnConfig
from fedhet.tasks.task import AnyTask
from fedhet.tasks.transform import Transform


def black_and_white(
    task: AnyTask, device: torch.device | str
) -> tuple[Tensor | None, Tensor | None]:
    """Return the inputs of pixels 0 and 1, by channel (C,); None if inputs are not images."""
    config = task.config
    if isinstance(config, OwnConfig):
        channels = (config.input_shape or (0,))[0]
        if config.input_range is None or not channels:
            return None, None
        black, white = (torch.full((channels,), value) for value in config.input_range)
        return black.to(device), white.to(device)
    if not isinstance(config.transform, Transform):
        return None, None
    scale, shift = config.transform.constants(torch.device(device))
    return shift, 255 * scale + shift
