"""A folder that lasts as long as a run; a later run removes what a killed run has left."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedhet.common.files import LOCK

MEMORY = Path("/dev/shm")
_PREFIX = "fedhet-"
_LEAST_BYTES = 256 << 20  # a container's /dev/shm has 64 MiB by default
_NEW_SECONDS = 60.0  # a folder may have no lock yet


@contextlib.contextmanager
def temporary_folder(root: Path | None = None) -> Iterator[Path]:
    """Make a folder in ``root`` and remove it at the end; by default in memory that has room.

    If all processes of a run are killed at once, as by a job scheduler, their folder stays and
    takes memory or disk. Its lock is then free, and the next run removes it.
    """
    if root is None:
        root = MEMORY if _has_room(MEMORY) else Path(tempfile.gettempdir())
    _remove_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    try:
        with FileLock(folder / LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _LEAST_BYTES


def _remove_abandoned(root: Path) -> None:
    for lock in root.glob(f"{_PREFIX}*/{LOCK}"):
        folder = lock.parent
        with contextlib.suppress(OSError, Timeout), FileLock(lock, timeout=0):
            if time.time() - folder.stat().st_mtime > _NEW_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
