"""One run on the local engine: the server's process, forked from the launcher, and its workers.

The launcher imports all that the apps need once and stays free of threads that compute; the server
is forked from it, and the workers from the server, so nothing is imported or loaded twice and what
they share is in memory once. The launcher reads the run's progress from its results directory, as
with Flower's simulation.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig

from common.files import last_lines
from fedhet.runtimes.processes import (
    NOTHING_LEFT,
    ProcessTree,
    Watchdog,
    adopt_orphans,
    end_with_parent,
    ray_environment,
)
from fedhet.runtimes.resources import cohort_size, cpus_for, share_of_machine

if TYPE_CHECKING:  # imported late: with them come Flower and torch, seconds of it
    from fedhet.runtimes.local.protocol import Workers

MARK = "FEDHET_RUN"  # in the environment of the processes that Ray starts for a run
CLIENT_APP = "client_app.app:app"
_HEAVY = (
    "server_app.app",
    "client_app.app",
    "fedhet.runtimes.local.worker_grid",
    "fedhet.runtimes.local.forked_workers",
)
_GRACE_SECONDS, _END_SECONDS = 0.3, 5.0
_LAST_SECONDS = 10  # of a server that was told to stop


class LocalRun:
    """A server process and its workers; a context manager that leaves no process behind.

    Args:
        log_path: where the run's log goes.
    """

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._server: BaseProcess | None = None
        self._uses_ray = False

    def __enter__(self) -> LocalRun:
        """Import what the apps need, once for all runs of this process."""
        for module in _HEAVY:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # the children then write less to the memory they share
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix=f"fedhet-{os.getpid()}-", dir=memory))
        adopt_orphans()
        self._process_tree = ProcessTree(MARK, str(self._folder))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the server and its workers."""
        self.close()

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Start the run.

        Args:
            recipe: the composed recipe.
            overrides: what the apps compose it from.
        """
        self._uses_ray = recipe.runtime.name == "ray"
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._server = context.Process(
            target=_serve,
            args=(list(overrides), self._folder, self.log_path),
            name="server",
        )
        self._server.start()

    def running(self) -> bool:
        """Return whether the run goes on."""
        assert self._server is not None
        return self._server.is_alive()

    def failure(self) -> str:
        """Return why the run ended, as far as the server's process can tell."""
        assert self._server is not None
        return (
            f"its server process ended with exit code {self._server.exitcode}: "
            f"{last_lines(self.log_path, 3)}"
        )

    def interrupted(self) -> str:
        """Return what is left of the run when the user has stopped the launcher."""
        return NOTHING_LEFT

    def close(self) -> None:
        """End the server and its workers."""
        if self._server is not None and self._server.pid is not None:
            self._server.join(_GRACE_SECONDS)  # a finished run ends by itself
            self._server.terminate()
            self._server.join(_END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)  # its workers are in its group
            self._server.kill()
            self._server.join()
        if self._uses_ray:
            self._process_tree.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(overrides: Sequence[str], folder: Path, log_path: Path) -> None:
    """Be the server: run the ServerApp over workers of its own."""
    os.setsid()  # the terminal's Ctrl-C is the launcher's to answer
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    _write_to(log_path)
    try:
        _run_server_app(overrides, folder)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the launcher may have been killed


def _run_server_app(overrides: Sequence[str], folder: Path) -> None:
    from flwr.app import Context, RecordDict

    from conf import compose_overrides
    from fedhet.runtimes.local.protocol import Federation
    from fedhet.runtimes.local.worker_grid import WorkerGrid
    from server_app.app import main

    recipe = compose_overrides(tuple(overrides))  # before the workers are forked: they inherit it
    run_config: dict[str, bool | float | int | str] = {"overrides": json.dumps(list(overrides))}
    federation = Federation(CLIENT_APP, run_config, int(recipe.clients))
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config
    )
    with contextlib.ExitStack() as stack:
        grid = WorkerGrid(_start_workers(recipe, folder, stack), federation)
        stack.callback(grid.close)
        main(grid, context)


def _start_workers(recipe: DictConfig, folder: Path, stack: contextlib.ExitStack) -> Workers:
    if recipe.runtime.name == "ray":
        stack.callback(Watchdog(folder, MARK, str(folder)).dismiss)  # Ray leaves its own if killed
        return _ray_workers(recipe, folder, stack)
    from fedhet.runtimes.local.forked_workers import ForkedWorkers

    share = share_of_machine(recipe)
    return ForkedWorkers(share.workers, folder, share.gpus)


def _ray_workers(recipe: DictConfig, folder: Path, stack: contextlib.ExitStack) -> Workers:
    os.environ.update({MARK: str(folder), **ray_environment(folder)})
    import ray

    stack.callback(ray.shutdown)  # before the guard ends Ray, also where no worker has started
    from fedhet.runtimes.local.ray_workers import Needs, RayWorkers

    runtime = recipe.runtime
    workers = RayWorkers(
        cohort_size(recipe),
        Needs(int(runtime.client_cpus), 0.0 if recipe.device == "cpu" else runtime.client_gpus),
        shared_folder=Path(recipe.results_dir) if runtime.simulation else None,
        address=runtime.address,
        num_cpus=cpus_for(recipe),
    )
    signal.signal(signal.SIGTERM, _stop)  # ray.init has put its own handler there
    return workers


def _write_to(log_path: Path) -> None:
    """Send all output of this process and its children to the log."""
    from flwr.common.logger import console_handler

    with log_path.open("ab") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    # new objects: another thread of the launcher may have held a lock of the old ones
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    console_handler.setStream(sys.stderr)
    logging.root.handlers.clear()  # Hydra's, for the terminal


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.alarm(_LAST_SECONDS)  # ends this process if what it cleans up hangs
    raise SystemExit(f"stopped by signal {number}")
