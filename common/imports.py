"""Imports of PyTorch and of all that needs it, faster."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pause the garbage collector inside the block.

    It would look at all the new functions and classes again and again, and find nothing: a fifth of
    the time that PyTorch takes to import.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
