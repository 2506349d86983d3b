"""Tensors on disk: safetensors files, written atomically; the hash of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file

from common.files import replace_file
from strategies.base import Tensors


def save_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically: after a crash it is the old one or the new one.

    Raises:
        OSError: if it cannot be written, as on a full disk; ``path`` is unchanged.
    """
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}

    def write(beside: Path) -> None:
        try:
            save_file(plain, beside, dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    replace_file(path, write)


def parameters_sha256(params: Tensors) -> str:
    """Return a hash of names, types, shapes and bits, independent of the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = params[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


_Value = TypeVar("_Value")


def below(prefix: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the entries whose names start with ``prefix``, by the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
