"""Issue: a SuperNode continues without its heartbeat after an error of the SuperLink.

One of its threads dies, and the server never sees the node again. With this it ends instead, and
Docker restarts it.
Mends: `threading.excepthook` in a SuperNode's process.
Releases: 1.39 to 1.42. Not needed when a SuperNode ends, or continues its heartbeat, by itself:
`tests/drills/test_docker.py::test_a_supernode_ends_when_one_of_its_threads_dies`.
"""

from __future__ import annotations

import os
import sys
import threading


def install() -> None:
    """Let this process end when the first of its threads dies."""
    threading.excepthook = _end_process


def _end_process(died: threading.ExceptHookArgs) -> None:
    """Print why a thread died, and end the process."""
    threading.__excepthook__(died)
    sys.stderr.write("a thread of the SuperNode died: the process ends, to be restarted\n")
    sys.stderr.flush()
    os._exit(1)
