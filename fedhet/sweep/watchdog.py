"""Ends the jobs of a sweep whose launcher process was killed, SIGKILL included."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from fedhet.runtimes.processes import ProcessTree
from fedhet.sweep.shutdown import end_jobs
from fedhet.sweep.sweep_folder import SweepFolder

MARK = "FEDHET_SWEEP"  # an environment variable that all processes of a sweep inherit
_PATIENCE_SECONDS = 10.0


class SweepGuard:
    """A process that waits for the launcher process to be gone.

    Args:
        folder: the sweep's, absolute.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedhet.sweep.watchdog", str(folder)],
            stdin=subprocess.PIPE,  # closed by the kernel when the launcher process dies
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it, and nothing else: a launcher's idle workers end with their parent."""
        self._process.kill()
        self._process.communicate()


def _watchdog(folder: SweepFolder) -> None:
    sys.stdin.buffer.read()
    folder.ask_to_stop()
    end_jobs(folder)
    process_tree = ProcessTree(MARK, str(folder.path))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while process_tree.members() and time.monotonic() < deadline:  # runs have guards of their own
        time.sleep(0.2)
    process_tree.end()


if __name__ == "__main__":
    _watchdog(SweepFolder(Path(sys.argv[1])))
