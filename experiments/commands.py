"""What fedhet's commands share: help from the docstring, whole numbers, and how errors are said."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console


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


def say_error(name: str, error: Exception) -> None:
    """Print a command's error to stderr; a path in it is not broken."""
    Console(stderr=True).print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
