"""Memory shared by the processes of one machine: mapped files in a folder such as /dev/shm.

Each file is written many times, so that its pages are allocated once; a new file per object would
take several times as long as the copy. Arrays that are already in such files (:class:`SharedSums`)
are not copied at all.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError
from fedhet.runtimes.temporary_folder import MEMORY

_INLINE_BYTES = 1 << 14  # fits in a pipe in one piece
_BUFFERS = 2


@dataclass(frozen=True)
class ArrayAddress:
    """Address of an array: the first ``size`` bytes of a file."""

    path: str
    size: int


@dataclass(frozen=True)
class Written:
    """Address of a pickled object: ``size`` bytes of a file, and its buffers behind them."""

    path: str
    size: int
    number: int = 0  # tells successive objects of one file apart
    # large arrays outside the pickle: lengths of those behind it, or addresses of the others
    buffers: tuple[int | ArrayAddress, ...] = ()


class WritableFile:
    """A file that holds one object at a time; created if missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._number = 0

    def write(self, content: object) -> Written:
        """Overwrite the file with an object."""
        return self.write_pickled(*pickled(content))

    def write_pickled(self, data: bytes, buffers: Sequence[memoryview | ArrayAddress]) -> Written:
        """Overwrite the file with a pickled object and its buffers that have no address yet."""
        where = tuple(one if isinstance(one, ArrayAddress) else len(one) for one in buffers)
        parts: list[bytes | memoryview] = [data]
        parts += [one for one in buffers if not isinstance(one, ArrayAddress)]
        mapped, at = self.mapped(sum(map(len, parts))), 0
        for part in parts:
            mapped[at : at + len(part)] = part
            at += len(part)
        self._number += 1
        return Written(self._path, len(data), self._number, where)

    def mapped(self, size: int) -> mmap.mmap:
        """Return the file's memory, at least ``size`` bytes."""
        if self._map is None or len(self._map) < size:
            with open(self._path, "a+b") as file:
                _allocate(file.fileno(), size, self._path)
                self._map = mmap.mmap(file.fileno(), size)
        return self._map


def _allocate(file: int, size: int, path: str) -> None:
    """Give a file its size and its memory; a page missing later would kill the process silently.

    Raises:
        ConfigError: if there is no room.
    """
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        room = "let TMPDIR name a larger disk"
        if Path(path).is_relative_to(MEMORY):
            room = "give a container more with --shm-size=2g"
        raise ConfigError(
            f"{path} cannot get {size / 1e6:.1f} MB ({error.strerror}) for the models that a run's "
            f"processes share: {room}, or run fewer clients at a time (runtime.num_cpus)"
        ) from None


def pickled(
    content: object, find: Callable[[memoryview], ArrayAddress | None] | None = None
) -> tuple[bytes, list[memoryview | ArrayAddress]]:
    """Return an object's pickle, and its large arrays beside it: they are copied once, or not.

    ``find`` returns the address of an array that other processes can read where it is.
    """
    large: list[memoryview | ArrayAddress] = []

    def inline(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if len(raw) > _INLINE_BYTES:
            large.append((find and find(raw)) or raw)
        return len(raw) <= _INLINE_BYTES

    return pickle.dumps(content, protocol=5, buffer_callback=inline), large


class SharedSums:
    """Arrays of whole numbers in files that other processes read in place."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: list[WritableFile] = []
        self._used: dict[int, ArrayAddress] = {}  # by address in this process

    def forget(self) -> None:
        """Allow the next arrays to overwrite the present ones."""
        self._used.clear()

    def empty(self, numbers: int) -> NDArray[np.int64]:
        """Return room for so many numbers."""
        if 8 * numbers <= _INLINE_BYTES:
            return np.empty(numbers, dtype=np.int64)
        used = len(self._used)
        path = f"{self._path}-{used}"
        if used == len(self._files):
            self._files.append(WritableFile(path))
        array = np.frombuffer(self._files[used].mapped(8 * numbers), np.int64, numbers)
        self._used[array.ctypes.data] = ArrayAddress(path, 8 * numbers)
        return array

    def find(self, buffer: memoryview) -> ArrayAddress | None:
        """Return an array's address, if it is one of these."""
        return self._used.get(np.frombuffer(buffer, np.uint8).ctypes.data)


class ReadableFiles:
    """Files written by other processes, mapped on first use."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, where: Written) -> Any:
        """Return a copy of an object; arrays in files of their own stay there."""
        here = [one for one in where.buffers if not isinstance(one, ArrayAddress)]
        view, at = self._mapped(where.path, where.size + sum(here)), where.size
        buffers: list[bytearray | memoryview] = []
        for one in where.buffers:
            if isinstance(one, ArrayAddress):
                buffers.append(self._mapped(one.path, one.size)[: one.size])
            else:
                buffers.append(bytearray(view[at : at + one]))
                at += one
        return pickle.loads(view[: where.size], buffers=buffers)

    def _mapped(self, path: str, size: int) -> memoryview:
        mapped = self._maps.get(path)
        if mapped is None or len(mapped) < size:  # the file has grown
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[path] = mapped
        return memoryview(mapped)


class Channel:
    """One end of a pipe that sends large objects through shared memory.

    At most two objects may be under way in one direction: the third overwrites the first. A number
    is appended to ``outgoing``, the path of the files for outgoing objects. Arrays of ``sums`` stay
    where they are.
    """

    def __init__(self, pipe: Connection, outgoing: str, sums: SharedSums | None = None) -> None:
        self._pipe, self._sums = pipe, sums
        self._files = [WritableFile(f"{outgoing}-{i}") for i in range(_BUFFERS)]
        self._incoming = ReadableFiles()

    def send(self, content: object) -> None:
        """Send an object; OSError if the other end is closed."""
        data, large = pickled(content, None if self._sums is None else self._sums.find)
        if large or len(data) > _INLINE_BYTES:
            self._files.reverse()
            data = pickle.dumps(self._files[0].write_pickled(data, large))
        self._pipe.send_bytes(data)

    def receive(self) -> Any:
        """Wait for an object and return it; EOFError if the other end is closed."""
        content = pickle.loads(self._pipe.recv_bytes())
        return self._incoming.read(content) if isinstance(content, Written) else content

    def fileno(self) -> int:
        """Return the pipe's file descriptor, for a selector."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Close this end."""
        self._pipe.close()
