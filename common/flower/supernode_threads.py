"""Issue: a SuperNode's process continues after an error of the SuperLink, and does nothing.

Its heartbeat dies, or its main thread ends and leaves the one that serves /health, and the
server never sees the node again. With this the process ends instead, and Docker restarts it.
Mends: `threading.excepthook` in a SuperNode's process.
Releases: 1.39 to 1.42. Not needed when a SuperNode ends, or continues its work, by itself:
`tests/drills/test_docker.py::test_a_supernode_ends_when_one_of_its_threads_dies`.
"""

from __future__ import annotations

import os
import sys
import threading
import time

_SECONDS = 20.0  # for the end of the other threads, which Flower waits for


def install() -> None:
    """Let this process end when the first of its threads dies, or the main thread ends."""
    threading.excepthook = _end_process
    threading.Thread(target=_end_after_main_thread, daemon=True).start()


def _end_after_main_thread() -> None:
    threading.main_thread().join()
    time.sleep(_SECONDS)
    os._exit(1)


def _end_process(died: threading.ExceptHookArgs) -> None:
    """Print why a thread died, and end the process."""
    threading.__excepthook__(died)
    sys.stderr.write("a thread of the SuperNode died: the process ends, to be restarted\n")
    sys.stderr.flush()
    os._exit(1)
