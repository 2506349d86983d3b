"""The console command `fedhet`, and `python -m fedhet`."""

from __future__ import annotations

import os
import signal
import sys

from fedhet.common.imports import quick_imports
from fedhet.runtimes.local.early_server import early_server


def main() -> None:
    """Start the server's process, then the launcher, whose imports take a while, too."""
    _open_standard_files()
    # Until the launcher handles it, Ctrl-C ends this process at once, and early_server's with it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    early = early_server(sys.argv[1:])
    try:
        with quick_imports():
            from fedhet.launch import main as launch

        launch(early)
    finally:
        if early is not None:
            early.dismiss()


def _open_standard_files() -> None:
    """Open what a daemon has closed of stdin, stdout and stderr: a pipe would get its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


if __name__ == "__main__":
    main()
