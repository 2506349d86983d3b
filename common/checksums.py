"""Checksums of the files that fedhet writes, and the labels that say what a file belongs to.

A safetensors file carries both in its metadata: ``fedhet``, a label as JSON (its format and kind,
the run, and more by kind), and ``sha256``, the hash of the whole file with 64 zeros in the hash's
own place. Files of version 0.1 have no checksum; they are read without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.errors import DamagedFileError

FORMAT = 3  # of labels; files of version 0.1 have no such key
CHECKPOINT, CLIENT_STATE, CLIENT_MODELS, MODEL = (
    "checkpoint",
    "client state",
    "client models",
    "model",
)
_ZEROS = b"0" * 64
_KEY = b'"sha256":"'

Label = Mapping[str, Any]


def sha256_of(*parts: bytes | memoryview) -> str:
    """Return the hash of these bytes, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """Return the hash of a text."""
    return sha256_of(text.encode("utf-8"))


def file_sha256(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def metadata_of(label: Label) -> dict[str, str]:
    """Return the metadata of a labelled file that has no checksum yet."""
    return {"fedhet": json.dumps({"format": FORMAT, **label}), "sha256": _ZEROS.decode()}


def with_checksum(file: bytes) -> Iterable[bytes | memoryview]:
    """Return the pieces of a safetensors file of :func:`metadata_of`, its checksum filled in."""
    place = file.index(_KEY + _ZEROS) + len(_KEY)
    view = memoryview(file)
    return view[:place], sha256_of(file).encode(), view[place + len(_ZEROS) :]


def read_labelled(path: Path) -> tuple[bytes, dict[str, str], dict[str, Any]]:
    """Return a safetensors file, its metadata and its label.

    Raises:
        DamagedFileError: if it cannot be read, or is not what was written.
    """
    try:
        file = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from None
    try:
        start = 8 + int.from_bytes(file[:8], "little")
        header = json.loads(file[8:start])
        metadata = header.pop("__metadata__", None) or {}
        label = dict(json.loads(metadata.get("fedhet", "{}")))
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        raise DamagedFileError(
            f"{path} cannot be read: it is damaged, or not a safetensors file"
        ) from None
    if end != len(file):
        raise DamagedFileError(f"{path} is damaged: it has {len(file)} bytes in place of {end}")
    if "sha256" in metadata or "format" in label:
        place = file.find(_KEY, 0, start) + len(_KEY)
        view = memoryview(file)
        found = sha256_of(view[:place], _ZEROS, view[place + len(_ZEROS) :])
        if metadata.get("sha256") != found:
            raise DamagedFileError(f"{path} is damaged: its content does not match its checksum")
    return file, metadata, label


def read_label(path: Path) -> dict[str, Any]:
    """Return the label of a file whose checksum holds; a file that has not changed is read once."""
    try:
        status = path.stat()
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from None
    return dict(_label(path, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4)
def _label(path: Path, inode: int, size: int, modified: int) -> dict[str, Any]:
    return read_labelled(path)[2]


def require_label(path: Path, label: Label, **expected: object) -> None:
    """Refuse a file that is another one than its name or its folder says.

    Files of version 0.1 have no label, and only what they say is compared.
    """
    for key, value in expected.items():
        found = label.get(key, None if "format" in label else value)
        if found != value:
            raise DamagedFileError(
                f"{path} is another file: its {key} is {found!r}, and {value!r} belongs there"
            )
