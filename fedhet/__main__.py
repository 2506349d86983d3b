"""The console command `fedhet`, and `python -m fedhet`."""

from __future__ import annotations

import sys

from fedhet.runtimes.local.early_server import early_server


def main() -> None:
    """Start the server's process, then the launcher, whose imports take a while, too."""
    early = early_server(sys.argv[1:])
    try:  # Ctrl-C may come before the launcher handles it
        from fedhet.launch import main as launch

        launch(early)
    finally:
        if early is not None:
            early.dismiss()


if __name__ == "__main__":
    main()
