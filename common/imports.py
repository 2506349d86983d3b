"""Imports of PyTorch and of all that needs it, faster."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LIBRARIES = {
    "libtorch_global_deps.so": ctypes.RTLD_GLOBAL,
    "libtorch_python.so": ctypes.DEFAULT_MODE,
}


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


def load_torch_libraries() -> None:
    """Load PyTorch's shared libraries in a thread, as its import will do.

    They take .3 of its 1.2 seconds, and leave the GIL to the thread that is composing the recipe.
    """
    spec = importlib.util.find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None or "torch" in sys.modules:
        return
    folder = Path(spec.origin).parent / "lib"

    def load() -> None:
        with suppress(OSError):  # the import says what is wrong
            for name, mode in _LIBRARIES.items():
                ctypes.CDLL(str(folder / name), mode=mode)

    threading.Thread(target=load, name="torch-libraries").start()  # exit waits for it
