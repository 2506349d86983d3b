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
from typing import Any, Protocol

import numpy as np

from fedhet.common.checksums import file_sha256, text_sha256
from fedhet.common.errors import ConfigError, SetupError
from fedhet.tasks.sources.arrays import Record, Split
from fedhet.tasks.sources.encodings import Encoding

FORMAT = 3  # of the cache's files; 2 had numbers in place of the clients' names
IDENTITY, MANIFEST = "identity.json", "checksums.json"
logger = logging.getLogger(__name__)

Stats = tuple[tuple[str, int, int, int], ...]
_whole: dict[Path, Stats] = {}  # folders that this process has checked, unless they change


class Decoder(Protocol):
    """One split of a data set, not yet decoded."""

    @property
    def identity(self) -> dict[str, object]:
        """All that the decoded examples depend on, as plain values."""

    @property
    def origin(self) -> dict[str, object]:
        """Where the examples come from, for the summary."""

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
    """Build a cache folder unless it exists and is whole; safe if several processes race.

    One process builds and the others wait. If the lock does not work (on some network drives), each
    builds its own folder, and the first complete one is kept. The folder appears when it is
    complete. A damaged folder is built again.
    """
    if _problem(folder) is None:
        return folder
    from filelock import FileLock

    _require_writable(folder.parent)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if (problem := _problem(folder)) is not None:
            if folder.exists():
                logger.warning("%s %s: it is made again", folder, problem)
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
            _build_and_publish(folder, build)
    return folder


def content_sha256(folder: Path) -> str:
    """Return the hash of a cache folder's content, whatever it was made from."""
    files = _read_manifest(folder)["files"]
    return text_sha256(json.dumps({name: files[name] for name in files if name != IDENTITY}))


def _problem(folder: Path) -> str | None:
    """Say what is wrong with a cache folder; None if it is whole."""
    if not folder.is_dir():
        return "is no folder"
    try:
        stats = _stats(folder)
        if _whole.get(folder) == stats:
            return None
        problem = _problem_of(folder, stats)
        if problem is None and _stats(folder) == stats:
            _whole[folder] = stats
    except OSError as error:  # another process is making it again
        return f"cannot be read ({error})"
    return problem


def _stats(folder: Path) -> Stats:
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found)


def _problem_of(folder: Path, stats: Stats) -> str | None:
    names = {name for name, *_ in stats} - {MANIFEST}
    try:
        manifest = _read_manifest(folder)
        if manifest["folder"] != folder.name:
            return f"is a copy of {manifest['folder']}"
        if names != set(manifest["files"]):
            return "lacks files or has others"
        hashes = manifest["files"]
        wrong = [name for name in sorted(names) if file_sha256(folder / name) != hashes[name]]
    except FileNotFoundError:
        return "has no checksums"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read ({error})"
    return f"is damaged ({', '.join(wrong)})" if wrong else None


def _read_manifest(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _require_writable(folder: Path) -> None:
    problem: object = "no permission"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
    except OSError as error:
        problem = error
    raise SetupError(
        f"the cache folder {folder} cannot be written ({problem}): let the environment variable "
        "FEDHET_CACHE name one that can"
    )


def _build_and_publish(folder: Path, build: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        build(unfinished)
        files = {path.name: file_sha256(path) for path in sorted(unfinished.iterdir())}
        manifest = {"folder": folder.name, "files": files}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        unfinished.chmod(0o755)
        unfinished.replace(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def decode_once(name: str, decoder: Decoder) -> Split:
    """Return the examples of a split, memory-mapped from the cache; decode them if necessary."""
    kind, folder = decoder.encoding.kind, decoded_folder(name, decoder)
    clients = folder / "clients.npy"
    return Split(
        values=np.load(folder / f"{kind}.npy", mmap_mode="r"),
        labels=np.load(folder / "labels.npy"),
        clients=np.load(clients) if clients.exists() else None,
    )


def decoded_folder(name: str, decoder: Decoder) -> Path:
    """Return the cache folder of a split; decode its examples if necessary."""
    folder = cache_folder() / decoder.encoding.kind / f"{name}-{cache_key(decoder.identity)}"
    return build_once(folder, lambda unfinished: _decode(name, decoder, unfinished))


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
    clients: list[str] = []
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
        if record.client is not None:
            clients.append(record.client)
    values.flush()
    np.save(folder / "labels.npy", labels)
    if clients:
        np.save(folder / "clients.npy", np.array(clients))
    (folder / IDENTITY).write_text(json.dumps(decoder.identity, indent=1))
