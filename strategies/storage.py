"""Tensors on disk: safetensors files, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from strategies.base import Tensors


def save_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically: after a crash it is the old one or the new one."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    entries = dict(metadata) if metadata else None
    replace_file(path, lambda beside: save_file(plain, beside, entries))


def save_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, flush it to disk and rename it.

    Raises:
        OSError: if that cannot be, as on a full disk; ``path`` is what it was.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    beside = Path(name)
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):  # neither says which file it was
            raise OSError(f"{path} could not be written: {error}") from error
        raise
