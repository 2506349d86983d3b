"""Memory that processes of one machine share: files in a folder like /dev/shm, mapped.

A file is written over and over, so that its pages are made once; a new file for each content takes
several times as long as the copying.
"""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection

_INLINE_BYTES = 1 << 14  # what a pipe passes in one piece
_ON_THEIR_WAY = 2


@dataclass(frozen=True)
class Written:
    """Where a pickled content lies: the first bytes of a file.

    Attributes:
        path: of the file.
        size: bytes.
        number: tells contents of one file apart.
    """

    path: str
    size: int
    number: int = 0


class WritableFile:
    """A file that holds one content at a time.

    Args:
        path: is made if it is not there.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._number = 0

    def write(self, data: bytes) -> Written:
        """Put a pickled content in place of the last one."""
        if self._map is None or len(self._map) < len(data):
            with open(self._path, "a+b") as file:
                file.truncate(len(data))
                self._map = mmap.mmap(file.fileno(), len(data))
        self._map[: len(data)] = data
        self._number += 1
        return Written(self._path, len(data), self._number)


class ReadableFiles:
    """The files of others, mapped when they are first read."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, where: Written) -> object:
        """Return a copy of the content, unpickled."""
        mapped = self._maps.get(where.path)
        if mapped is None or len(mapped) < where.size:  # it has grown
            with open(where.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[where.path] = mapped
        return pickle.loads(memoryview(mapped)[: where.size])


class Channel:
    """One end of a pipe whose large contents go through shared memory.

    No more than two contents may be on their way in one direction: the third is written over the
    first.

    Args:
        pipe: this end.
        outgoing: path of the files for what is sent from here; a number is added.
    """

    def __init__(self, pipe: Connection, outgoing: str) -> None:
        self._pipe = pipe
        self._files = [WritableFile(f"{outgoing}-{i}") for i in range(_ON_THEIR_WAY)]
        self._incoming = ReadableFiles()

    def send(self, content: object) -> None:
        """Send a content.

        Raises:
            OSError: if the other end is closed.
        """
        data = pickle.dumps(content, protocol=5)
        if len(data) > _INLINE_BYTES:
            self._files.reverse()
            data = pickle.dumps(self._files[0].write(data))
        self._pipe.send_bytes(data)

    def receive(self) -> object:
        """Wait for a content and return it.

        Raises:
            EOFError: if the other end is closed.
        """
        content = pickle.loads(self._pipe.recv_bytes())
        return self._incoming.read(content) if isinstance(content, Written) else content

    def fileno(self) -> int:
        """Return the pipe's file descriptor, to wait for."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Close this end."""
        self._pipe.close()
