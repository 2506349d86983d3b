"""The device that a model trains on, and how the C library manages its memory on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from fedhet.common.errors import SetupError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_TRIM_BYTES, _MMAP_BYTES = 1 << 30, 32 << 20  # the second is glibc's largest


def pick_device(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SetupError(
            f"device={name} is unknown; allowed: auto, cpu, cuda, or one GPU such as cuda:1"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SetupError(
            f"device={name}: this machine has {torch.cuda.device_count() or 'no'} CUDA devices; "
            "set device=auto or cpu"
        )
    return device


def make_repeatable(device: torch.device) -> None:
    """Let this process compute the same bits every time on a GPU.

    PyTorch then chooses algorithms that add in a fixed order, and warns if an operator has none.
    On a CPU all operators have one. cuBLAS reads its setting when it is first used.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # a benchmark would choose by the clock


def keep_freed_memory() -> bool:
    """Let glibc reuse freed memory instead of returning it to the kernel in every step.

    This saves a quarter of a training step on a CPU (docs/results/floor.md). Return False if the C
    library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
    )
