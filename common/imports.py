"""Makes imports of PyTorch faster, and of what needs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pause the garbage collector inside the block.

    The collector would inspect all new functions and classes again and again and find nothing. That
    takes a fifth of the time of PyTorch's import.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
