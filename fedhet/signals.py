"""Ctrl-C, SIGTERM and SIGHUP: what ends a process, also where a library swallows it.

A signal's handler raises. Hydra and OmegaConf have been seen to swallow that, or to make an error
of their own of it. So the signal is remembered, and :func:`end_if_signalled` raises it again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fedhet.runtimes.processes import ENDING, NOTHING_LEFT
from fedhet.sweep import session

OF_WORKER = (signal.SIGINT, signal.SIGTERM)  # what end_worker handles
_came: int | None = None  # the number of the signal that has come


def handle_in_launcher() -> None:
    """Let a signal stop the sweep, if there is one, and end the launcher's process."""
    for number in ENDING:  # the shell lets background jobs ignore SIGINT, and nohup SIGHUP
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_launcher)


def end_launcher(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the launcher."""
    global _came
    _came = number
    session.stop()
    end_if_signalled()


def end_worker(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal in a sweep's worker process: once, however many there are."""
    global _came
    for one in OF_WORKER:
        signal.signal(one, signal.SIG_IGN)
    _came = signal.SIGTERM  # as silent as that, also if Ctrl-C has reached it
    sys.exit(128 + number)


def forget() -> None:
    """Forget a signal that has ended one job of this process, for the next one."""
    global _came
    _came = None


def end_if_signalled() -> None:
    """Raise what ends the process if a signal has come: a library may have swallowed it."""
    if _came == signal.SIGINT:
        raise KeyboardInterrupt(NOTHING_LEFT)
    if _came is not None:
        sys.exit(128 + _came)


@contextmanager
def signals_first() -> Iterator[None]:
    """Let no error hide a signal: libraries make errors of their own of what one raises in them."""
    try:
        yield
    except Exception:
        end_if_signalled()
        raise
