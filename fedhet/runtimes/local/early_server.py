"""The server's process of a run, started before the launcher knows what to run.

Importing PyTorch and the apps takes longer than Hydra takes to compose the recipe, and one process
imports one module at a time. So `fedhet` first forks the server's process. It imports what the apps
need while the launcher composes; then the launcher tells it what to check and to run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.common.errors import ConfigError
from fedhet.common.imports import load_torch_beside, quick_imports

if TYPE_CHECKING:
    from omegaconf import DictConfig

_WITH_SERVER = ("runtime=local", "runtime=ray")


class EarlyServer:
    """The server's process; ``process`` is the launcher's child.

    Start it before this process has threads, and before it has imported much.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_prepare, args=(far, self._pipe), name="server"
        )
        self.process.start()
        far.close()

    def begin_check(self, recipe: DictConfig) -> None:
        """Ask whether a recipe's parts can be built; :meth:`end_check` waits for the answer."""
        with suppress(OSError):  # the process has died: end_check says so
            self._pipe.send(recipe)

    def end_check(self) -> bool:
        """Wait until everything is imported; return whether the process can serve the recipe.

        It cannot if it has died, or met an error that does not fit through a pipe.

        Raises:
            ConfigError: raised by a constructor.
        """
        try:
            error = self._pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(error, ConfigError):
            raise error
        return error is None

    def serve(self, overrides: Sequence[str], folder: Path, log_path: Path) -> None:
        """Let the process run the server of the recipe that these overrides compose to."""
        from fedhet.conf import compose_overrides, fingerprint  # Hydra: not before the fork

        recipe = compose_overrides(tuple(overrides))
        code = fingerprint(recipe)["code"]
        with suppress(OSError):  # the process has died: its exit code says so
            self._pipe.send((recipe, code, list(overrides), folder, log_path))
        self._pipe.close()

    def dismiss(self) -> None:
        """End the process, if it has nothing to run."""
        if not self._pipe.closed:
            self._pipe.close()
            self.process.kill()
            self.process.join()


def early_server(words: Sequence[str]) -> EarlyServer | None:
    """Start the server's process if a command's words start one local run; else return None."""
    runtimes = [word for word in words if word.startswith("runtime=")]
    flags = any(word.startswith("-") for word in words)
    if sys.platform != "linux" or flags or not set(runtimes) <= set(_WITH_SERVER):
        return None
    return EarlyServer()


def _prepare(pipe: Connection, near: Connection) -> None:
    """Import what the apps need; then do what the launcher says."""
    near.close()
    os.setsid()  # the launcher handles the terminal's Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from fedhet.runtimes.processes import end_with_parent

    end_with_parent(signal.SIGKILL)
    loading = load_torch_beside()
    with quick_imports():
        import flwr.clientapp
        import flwr.serverapp  # noqa: F401

        from fedhet.conf import hand_over
        from fedhet.runtimes.local.run import import_apps, serve

    import_apps()
    loading.join()  # this process will fork
    while True:
        try:
            told = pipe.recv()
        except EOFError:
            return
        if isinstance(told, tuple):
            pipe.close()
            recipe, code, overrides, folder, log_path = told
            hand_over(tuple(overrides), recipe, code)
            serve(overrides, folder, log_path)
            return
        pipe.send(_error_of(told))


def _error_of(recipe: DictConfig) -> ConfigError | str | None:
    """Return the ConfigError of a recipe's constructors, or a bug's name."""
    from fedhet.conf.project import find_modules_in
    from fedhet.server_app.assembly import check_parts

    find_modules_in(os.getcwd())  # as the launcher does
    try:
        check_parts(recipe)
    except ConfigError as error:
        return error
    except Exception as error:
        return type(error).__name__
    return None
