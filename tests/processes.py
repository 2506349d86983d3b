"""Which of some processes are still there."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[str]:
    """Return the names of those that run; one that its parent has not reaped yet does not."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.NoSuchProcess:
            continue
    return found
