"""Memory shared by the processes of one machine: mapped files in a folder such as /dev/shm.

Each file is written many times, so that its pages are allocated once; a new file per object would
take several times as long as the copy.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_INLINE_BYTES = 1 << 14  # fits in a pipe in one piece
_BUFFERS = 2


@dataclass(frozen=True)
class Written:
    """Address of a pickled object: ``size`` bytes of a file, and its buffers behind them."""

    path: str
    size: int
    number: int = 0  # distinguishes successive objects of one file
    buffers: tuple[int, ...] = ()  # the lengths of large arrays, which are not in the pickle


class WritableFile:
    """A file that holds one object at a time; created if missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._number = 0

    def write(self, data: bytes, buffers: Sequence[memoryview] = ()) -> Written:
        """Overwrite the file with a pickled object and its buffers."""
        lengths = tuple(len(buffer) for buffer in buffers)
        size = len(data) + sum(lengths)
        if self._map is None or len(self._map) < size:
            with open(self._path, "a+b") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        at, parts = 0, list[bytes | memoryview]([data, *buffers])
        for part in parts:
            self._map[at : at + len(part)] = part
            at += len(part)
        self._number += 1
        return Written(self._path, len(data), self._number, lengths)


class ReadableFiles:
    """Files written by other processes, mapped on first use."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, where: Written) -> Any:
        """Return a copy of an object."""
        mapped, size = self._maps.get(where.path), where.size + sum(where.buffers)
        if mapped is None or len(mapped) < size:  # the file has grown
            with open(where.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[where.path] = mapped
        view, at, buffers = memoryview(mapped), where.size, list[bytearray]()
        for length in where.buffers:
            buffers.append(bytearray(view[at : at + length]))
            at += length
        return pickle.loads(view[: where.size], buffers=buffers)


class Channel:
    """One end of a pipe that sends large objects through shared memory.

    At most two objects may be under way in one direction: the third overwrites the first. A number
    is appended to ``outgoing``, the path of the files for outgoing objects.
    """

    def __init__(self, pipe: Connection, outgoing: str) -> None:
        self._pipe = pipe
        self._files = [WritableFile(f"{outgoing}-{i}") for i in range(_BUFFERS)]
        self._incoming = ReadableFiles()

    def send(self, content: object) -> None:
        """Send an object; OSError if the other end is closed."""
        large: list[memoryview] = []

        def inline(buffer: pickle.PickleBuffer) -> bool:
            """Take a large array out of the pickle: it is copied once, into the file."""
            raw = buffer.raw()
            if len(raw) > _INLINE_BYTES:
                large.append(raw)
            return len(raw) <= _INLINE_BYTES

        data = pickle.dumps(content, protocol=5, buffer_callback=inline)
        if large or len(data) > _INLINE_BYTES:
            self._files.reverse()
            data = pickle.dumps(self._files[0].write(data, large))
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
