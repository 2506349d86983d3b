"""What fedhet's commands share: argument types, tables, and how errors are reported."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

from hydra.errors import HydraException
from rich.console import Console

from fedhet.common.errors import ConfigError
from fedhet.common.imports import quick_imports
from fedhet.conf.project import find_modules_in
from fedhet.runtimes.flower_install import LaunchError

_UNLIMITED = 10_000  # columns
_Number = TypeVar("_Number", int, float)


@contextmanager
def reported_errors(command: str) -> Iterator[None]:
    """Run a command's body, which may import the user's modules of the current folder.

    An error of the user is printed as `COMMAND: message`, with exit code 1; Ctrl-C has 130. A
    letter that the terminal's encoding has not is printed as its number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does
    try:
        find_modules_in(_current_folder())
        yield
    except (ConfigError, LaunchError, HydraException, OSError) as error:
        say_error(command, error)
        raise SystemExit(1) from None
    except KeyboardInterrupt as interrupt:
        say_error(command, str(interrupt) or "stopped")
        raise SystemExit(130) from None


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more: go to another") from None


def say_error(command: str, error: Exception | str) -> None:
    """Print a command's error to stderr; long paths are not broken."""
    Console(stderr=True).print(f"{command}: {error}", style="red", markup=False, soft_wrap=True)


def parser_of(command: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the module's docstring as its help."""
    return argparse.ArgumentParser(
        prog=command,
        description=documentation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust``, by which the user vouches for the code that the runs' recipes name."""
    trust = "import any code that the recipe names: you vouch for whoever made the folder"
    parser.add_argument("--trust", action="store_true", help=trust)


def at_least(low: int) -> Callable[[str], int]:
    """Return the argparse type of whole numbers of at least ``low``."""

    def whole_number(text: str) -> int:
        value = _read(int, text, "a whole number")
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} must be {low} or more")
        return value

    return whole_number


def number_between(low: float, high: float, *, with_low: bool = False) -> Callable[[str], float]:
    """Return the argparse type of numbers in (low, high), or in [low, high)."""

    def number(text: str) -> float:
        value = _read(float, text, "a number")
        if not (low < value < high or (with_low and value == low)):
            bracket = "[" if with_low else "("
            raise argparse.ArgumentTypeError(f"{text} must lie in {bracket}{low:g}, {high:g})")
        return value

    return number


def _read(kind: type[_Number], text: str, expected: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not {expected}") from None


def table_console() -> Console:
    """Return a console for stdout; tables that go to a file or a pipe are not folded."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNLIMITED
    return console


def _console_script(module: str) -> Callable[[], None]:
    """Return the console script that runs a module's ``main``; it starts and ends faster.

    What is imported stays to the end: the garbage collector need not look at it, not even then.
    """

    def script() -> None:
        with quick_imports():
            command = import_module(module)
        gc.freeze()
        command.main()

    return script


conformal = _console_script("fedhet.tools.conformal.command")
evaluate = _console_script("fedhet.tools.evaluate")
export = _console_script("fedhet.tools.export")
partition = _console_script("fedhet.tools.partition")
policy = _console_script("fedhet.tools.policy")
predict = _console_script("fedhet.tools.predict")
task_file = _console_script("fedhet.tools.task_file")
report = _console_script("fedhet.report.command")
watch = _console_script("fedhet.report.live")
