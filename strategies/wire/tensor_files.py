"""Tensors on disk: safetensors files with a checksum, written atomically; the hash of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedhet.common.checksums import Label, add_checksum, metadata_of, read_header, require_label
from fedhet.common.errors import DamagedFileError, UnreadableFileError
from fedhet.common.files import replace_file
from fedhet.strategies.base import Tensors


def save_tensors(
    path: Path, tensors: Tensors, label: Label, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically: after a crash it is the old one or the new one.

    Args:
        path: of the file.
        tensors: by name.
        label: what the file is and the run that it belongs to (common/checksums.py).
        metadata: further entries of the file's metadata.

    Raises:
        OSError: if it cannot be written, as on a full disk; ``path`` is unchanged.
    """
    plain = _apart({name: value.detach().cpu().contiguous() for name, value in tensors.items()})

    def write(beside: Path) -> None:
        try:
            save_file(plain, beside, {**(metadata or {}), **metadata_of(label)})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        add_checksum(beside)

    replace_file(path, write)


def _apart(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors, copied if they share memory, which safetensors refuses."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        place = value.untyped_storage().data_ptr()
        found[name] = value.clone() if place in seen else value
        seen.add(place)
    return found


def load_tensors(
    path: Path, **expected: object
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Return the tensors, sorted by name, the metadata and the label of a file.

    ``expected`` are entries that the label must have, such as ``kind`` and ``run``.

    Raises:
        DamagedFileError: if the file is missing, damaged, or another one.
    """
    metadata, label = read_header(path)
    require_label(path, label, **expected)
    try:
        return dict(sorted(load_file(path).items())), metadata, label
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from None


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
