"""Makes imports of PyTorch faster, and of what needs it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

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


def import_torchmetrics() -> None:
    """Import torchmetrics without the packages of its plots, images and texts.

    It would import all that are installed, among them pyplot and PyTorch's compiler, which takes
    two of its three seconds. What it then lacks are classes that fedhet has no metric for.
    """
    from lightning_utilities.core.imports import RequirementCache

    is_there = RequirementCache.__bool__

    def is_wanted(package: RequirementCache) -> bool:
        return not str(package.requirement).startswith(_EXTRAS) and is_there(package)

    RequirementCache.__bool__ = is_wanted
    try:
        importlib.import_module("torchmetrics.classification")
    finally:
        RequirementCache.__bool__ = is_there
