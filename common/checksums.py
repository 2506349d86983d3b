"""Checksums of the files that fedhet writes, and the labels that say what a file belongs to.

A safetensors file carries both in its metadata: ``fedhet``, a label as JSON (its format and kind,
the run, and more by kind), and ``sha256``, the hash of the whole file with 64 zeros in the hash's
own place. The user's own safetensors files, from which a run may begin, have neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from fedhet.common.errors import DamagedFileError, UnreadableFileError

FORMAT = 3  # of labels
CHECKPOINT, CLIENT_STATE, CLIENT_MODELS, MODEL = (
    "checkpoint",
    "client state",
    "client models",
    "model",
)
_ZEROS = b"0" * 64
_KEY = b'"sha256":"'

Label = Mapping[str, Any]


def sha256_of(*parts: bytes | memoryview | mmap) -> str:
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


def add_checksum(path: Path) -> None:
    """Fill the checksum into a safetensors file with :func:`metadata_of`."""
    with path.open("r+b") as file, mmap(file.fileno(), 0) as content:
        place = content.find(_KEY + _ZEROS) + len(_KEY)
        content[place : place + len(_ZEROS)] = sha256_of(content).encode()


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the metadata and the label of a safetensors file, if its checksum holds.

    Raises:
        DamagedFileError: if it differs from what was written; UnreadableFileError if it cannot be
            read.
    """
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return _read_header(path, content)
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(
            f"{path} cannot be read: it is damaged, or not a safetensors file"
        ) from None


def _read_header(path: Path, content: mmap) -> tuple[dict[str, str], dict[str, Any]]:
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", None) or {}
    label = dict(json.loads(metadata.get("fedhet", "{}")))
    if "sha256" in metadata or "format" in label:
        place = content.find(_KEY, 0, start) + len(_KEY)
        with memoryview(content) as view, view[:place] as head, view[place + 64 :] as rest:
            found = sha256_of(head, _ZEROS, rest)
        if metadata.get("sha256") != found:
            raise DamagedFileError(f"{path} is damaged: its content does not match its checksum")
    return metadata, label


def read_label(path: Path) -> dict[str, Any]:
    """Return a file's label if its checksum holds; read a file again only if it has changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}") from None
    return dict(_label(path, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4)
def _label(path: Path, inode: int, size: int, modified: int) -> dict[str, Any]:
    return read_header(path)[1]


def require_label(path: Path, label: Label, **expected: object) -> None:
    """Reject a file whose label differs from what its name or its folder says."""
    for key, value in expected.items():
        if label.get(key) != value:
            raise DamagedFileError(
                f"{path} is the wrong file: its {key} is {label.get(key)!r}, but must be {value!r}"
            )
