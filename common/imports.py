"""Makes imports of PyTorch faster, and of what needs it."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EXTRAS = ("matplotlib", "torchvision", "transformers")


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


def load_torch_beside() -> threading.Thread:
    """Let a thread load PyTorch's largest library while this one imports other packages (Linux).

    It takes a tenth of the import, and no Python. What goes wrong, the import says.
    """

    def load() -> None:
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / "lib"
            dlopen = ctypes.CDLL(None).dlopen  # called so, it leaves Python's lock to others
            dlopen.restype = ctypes.c_void_p
            dlopen(bytes(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
            dlopen(bytes(folder / "libtorch_cpu.so"), os.RTLD_NOW)

    thread = threading.Thread(target=load)
    thread.start()
    return thread


def import_torchmetrics() -> None:
    """Import torchmetrics without the packages of its plots, images and texts.

    It would import all that are installed, among them pyplot and PyTorch's compiler, which takes
    two of its three seconds. What it then lacks are classes that fedhet has no metric for.
    """
    from lightning_utilities.core.imports import RequirementCache

    is_there = RequirementCache.__bool__

    def is_wanted(package: RequirementCache) -> bool:
        return not str(package.requirement).startswith(_EXTRAS) and is_there(package)

    RequirementCache.__bool__ = is_wanted  # type: ignore[method-assign,assignment]
    try:
        importlib.import_module("torchmetrics.classification")
    finally:
        RequirementCache.__bool__ = is_there  # type: ignore[method-assign]
