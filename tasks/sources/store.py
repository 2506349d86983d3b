"""The cache of decoded splits: arrays that every process maps into its memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from common.errors import ConfigError
from tasks.sources.arrays import Record, Split
from tasks.sources.encodings import Encoding

FORMAT = 1  # of the cache's files
logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """One split of a data set, not yet decoded."""

    @property
    def identity(self) -> dict[str, object]:
        """All that the decoded examples depend on, as plain values."""

    @property
    def encoding(self) -> Encoding:
        """The encoding of the examples."""

    def count(self) -> int:
        """Return the number of examples."""

    def records(self) -> Iterator[Record]:
        """Yield the decoded examples in order."""


def cache_folder() -> Path:
    """Return FEDHET_CACHE, or ~/.cache/fedhet."""
    return Path(os.environ.get("FEDHET_CACHE") or Path.home() / ".cache" / "fedhet")


def cache_key(identity: object) -> str:
    """Return a short hash of plain values and the cache's format."""
    text = json.dumps([FORMAT, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a cache folder unless it exists; safe if several processes race.

    One process builds and the others wait. If the lock does not hold (on some network drives) each
    builds its own, and the first complete one is kept. The folder appears when it is complete.
    """
    if folder.is_dir():
        return folder
    from filelock import FileLock

    _require_writable(folder.parent)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            _build_and_publish(folder, build)
    return folder


def _require_writable(folder: Path) -> None:
    problem: object = "no permission"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
    except OSError as error:
        problem = error
    raise ConfigError(
        f"the cache folder {folder} cannot be written ({problem}): let the environment variable "
        "FEDHET_CACHE name one that can"
    )


def _build_and_publish(folder: Path, build: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        build(unfinished)
        unfinished.chmod(0o755)
        unfinished.replace(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def decode_once(name: str, decoder: Decoder) -> Split:
    """Return the examples of a split, memory-mapped from the cache; decode them if necessary."""
    kind = decoder.encoding.kind
    folder = cache_folder() / kind / f"{name}-{cache_key(decoder.identity)}"
    build_once(folder, lambda unfinished: _decode(name, decoder, unfinished))
    groups = folder / "groups.npy"
    return Split(
        values=np.load(folder / f"{kind}.npy", mmap_mode="r"),
        labels=np.load(folder / "labels.npy"),
        groups=np.load(groups) if groups.exists() else None,
    )


def _decode(name: str, decoder: Decoder, folder: Path) -> None:
    from rich.console import Console
    from rich.progress import track

    count, encoding = decoder.count(), decoder.encoding
    if count == 0:
        raise ConfigError(f"{name} holds no examples: {decoder.identity}")
    logger.info("decoding %d examples of %s into %s, once", count, name, folder.parent)
    path, shape = folder / f"{encoding.kind}.npy", (count, *encoding.shape)
    values = np.lib.format.open_memmap(path, mode="w+", dtype=encoding.dtype, shape=shape)
    labels = np.empty(count, dtype=np.int64)
    groups: list[str] = []
    records = track(
        decoder.records(),
        f"decoding {name}, once",
        total=count,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    for row, record in enumerate(records):
        values[row], labels[row] = record.value, record.label
        if record.group is not None:
            groups.append(record.group)
    values.flush()
    np.save(folder / "labels.npy", labels)
    if groups:
        _, numbers = np.unique(np.array(groups), return_inverse=True)
        np.save(folder / "groups.npy", numbers.astype(np.int64))
    (folder / "identity.json").write_text(json.dumps(decoder.identity, indent=1))
