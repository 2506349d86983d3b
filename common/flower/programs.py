"""Issue: a container checks a program's command line before it becomes that program.

Uses: the parsers of `flower-superlink` and `flower-supernode`, because they also accept
abbreviations such as `--hos`, and know the defaults. The programs themselves are found by the
commands that Flower installs.
Releases: 1.39 to 1.42. Not needed when Flower's programs refuse an open Control by themselves:
`tests/drills/test_docker.py::test_flowers_superlink_accepts_an_open_control`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn


def superlink_options(arguments: Sequence[str]) -> Any:
    """Return the options of a `flower-superlink` command."""
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    return _parse_args_run_superlink().parse_args(arguments)


def supernode_options(arguments: Sequence[str]) -> Any:
    """Return the options of a `flower-supernode` command."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    return _parse_args_run_supernode().parse_args(arguments)


def become(command: Sequence[str]) -> NoReturn:
    """Run one of Flower's programs in this process."""
    (program,) = entry_points(group="console_scripts", name=command[0])
    sys.argv = list(command)
    sys.exit(program.load()())
