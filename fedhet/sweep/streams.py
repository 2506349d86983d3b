"""Where the words of a process go: to a file, while the terminal is the sweep's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def words_to(words: Path, errors: Path) -> Iterator[None]:
    """Let all that this process and its children print go to files; what is there stays.

    Args:
        words: for stdout.
        errors: for stderr; may be the same file.
    """
    with ExitStack() as stack:
        for number, path in ((1, words), (2, errors)):
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            stack.callback(_flush)
            _flush()
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
        yield


def own_stdout() -> IO[str]:
    """Return a file of its own on what stdout is now, whatever becomes of stdout."""
    return os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
