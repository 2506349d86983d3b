"""What fedhet's commands share: help from the docstring, whole numbers, tables, and errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from rich.console import Console

_NO_SCREEN = 10_000  # columns: a table takes what it needs of them


def parser_of(name: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=name,
        description=documentation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least(low: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number of at least ``low``."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} must be {low} or more")
        return value

    return whole_number


def table_console() -> Console:
    """Return a console for stdout that folds no table which goes into a file or a pipe."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_SCREEN
    return console


def say_error(name: str, error: Exception) -> None:
    """Print a command's error to stderr; a path in it is not broken."""
    Console(stderr=True).print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
