"""Memory shared by the processes of one machine: mapped files in a folder such as /dev/shm.

Each file is written many times, so that its pages are allocated once; a new file per object would
take several times as long as the copy.
"""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_INLINE_BYTES = 1 << 14  # fits in a pipe in one piece
_BUFFERS = 2


@dataclass(frozen=True)
class Written:
    """Address of a pickled object: the first ``size`` bytes of a file."""

    path: str
    size: int
    number: int = 0  # distinguishes successive objects of one file


class WritableFile:
    """A file that holds one object at a time; created if missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._number = 0

    def write(self, data: bytes) -> Written:
        """Overwrite the file with a pickled object."""
        if self._map is None or len(self._map) < len(data):
            with open(self._path, "a+b") as file:
                file.truncate(len(data))
                self._map = mmap.mmap(file.fileno(), len(data))
        self._map[: len(data)] = data
        self._number += 1
        return Written(self._path, len(data), self._number)


class ReadableFiles:
    """Files written by other processes, mapped on first use."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, where: Written) -> Any:
        """Return a copy of an object."""
        mapped = self._maps.get(where.path)
        if mapped is None or len(mapped) < where.size:  # the file has grown
            with open(where.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[where.path] = mapped
        return pickle.loads(memoryview(mapped)[: where.size])


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
        data = pickle.dumps(content, protocol=5)
        if len(data) > _INLINE_BYTES:
            self._files.reverse()
            data = pickle.dumps(self._files[0].write(data))
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
