"""One run without a SuperLink: a server process, forked from the launcher, and its workers.

One process imports what the apps need: the launcher, which then forks the server, or a server that
was started early (local/early_server.py). The server forks the workers, which share its modules and
data. So no process may start threads that compute before that.
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
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from omegaconf import DictConfig

from fedhet.common.files import last_error, last_lines
from fedhet.common.imports import import_torchmetrics, quick_imports
from fedhet.common.metrics import is_own
from fedhet.conf import compose_overrides
from fedhet.runtimes.processes import (
    NOTHING_LEFT,
    ProcessTree,
    Watchdog,
    adopt_orphans,
    end_with_parent,
    exit_text,
    ray_environment,
)
from fedhet.runtimes.resources import cohort_size, cpus_for, share_of_machine
from fedhet.runtimes.temporary_folder import MEMORY, temporary_folder

if TYPE_CHECKING:  # imports Flower and torch, which takes seconds
    from fedhet.runtimes.local.early_server import EarlyServer
    from fedhet.runtimes.local.protocol import Workers

MARK = "FEDHET_RUN"  # in the environment of the processes that Ray starts for a run
CLIENT_APP = "fedhet.client_app.app:app"
_HEAVY = (
    "fedhet.server_app.app",
    "fedhet.client_app.app",
    "fedhet.runtimes.local.worker_grid",
    "fedhet.runtimes.local.forked_workers",
)
# Packages that a model may need and that take seconds to import; with the names of fedhet's models.
_SLOW = ("torchvision", "timm", "transformers")
_ON_TORCHVISION = ("frozen_", "feddw_mobilenetv2")
_GRACE_SECONDS, _END_SECONDS = 3.0, 5.0
_ERROR = 1  # exit code of a server whose log ends with a traceback
_CLEANUP_SECONDS = 10  # for a server that was told to stop
_launchers_streams: list[object] = []


class LocalRun:
    """A server process and its workers; the context manager leaves no process behind."""

    def __init__(self, log_path: Path, early: EarlyServer | None = None) -> None:
        self.log_path = log_path
        self._early = early
        self._server: BaseProcess | None = None
        self._uses_ray = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Import what the apps need, once for all runs, if there is no early server."""
        if self._early is None:
            import_apps()
        self._folder = self._stack.enter_context(temporary_folder())
        adopt_orphans()
        self._process_tree = ProcessTree(MARK, str(self._folder))
        return self

    def __exit__(self, *error: object) -> None:
        """End the server and its workers."""
        if self._server is not None and self._server.pid is not None:
            if error[0] is None:  # a completed run ends by itself
                self._server.join(_GRACE_SECONDS)
            self._server.terminate()
            self._server.join(_END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)  # its workers are in its group
            self._server.kill()
            self._server.join()
        if self._uses_ray:
            self._process_tree.end()
        self._stack.close()

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Start the server's process."""
        self._uses_ray = recipe.runtime.name == "ray"
        if self._early is not None:
            self._early.serve(overrides, self._folder, self.log_path)
            self._server = self._early.process
            return
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        arguments = (list(overrides), self._folder, self.log_path)
        self._server = context.Process(target=serve, args=arguments, name="server")
        self._server.start()

    def running(self) -> bool:
        """Return whether the run has not ended yet."""
        assert self._server is not None
        return self._server.is_alive()

    def failure(self) -> str:
        """Return the server's error, or its exit code and the end of its log if it was killed."""
        assert self._server is not None
        if (code := self._server.exitcode) == _ERROR:
            return last_error(self.log_path)
        said = last_lines(self.log_path, 3)
        return f"its server process ended with {exit_text(code)}: {said}"

    def continues(self) -> bool:
        """Return whether the run continues after the launcher was stopped."""
        return False

    def interrupted(self) -> str:
        """Say what remains of the run after the user has stopped the launcher."""
        return NOTHING_LEFT


def import_apps() -> None:
    """Import what the apps need, in a process from which others will be forked."""
    with quick_imports():
        for module in _HEAVY:
            importlib.import_module(module)
    gc.freeze()  # so that the children write less to shared pages


def libraries_of(recipe: DictConfig) -> list[str]:
    """Return the packages that take long and that the server and every worker of a run need.

    They are imported once, before the workers are forked, and not in each process.
    """
    model = str(recipe.task.get("model") or "")
    package = model.partition(":")[0]
    found = ["torchvision"] if model.startswith(_ON_TORCHVISION) else []
    if package.partition(".")[0] in _SLOW:
        found.append(package)
    if recipe.evaluation.metrics:
        found.append("torchmetrics")
    return found


def _import_library(name: str, recipe: DictConfig) -> None:
    with contextlib.suppress(ImportError), quick_imports():  # who needs it says so
        if name == "torchmetrics" and not any(map(is_own, recipe.evaluation.metrics)):
            import_torchmetrics()
        else:
            importlib.import_module(name)


def serve(overrides: Sequence[str], folder: Path, log_path: Path) -> None:
    """Run the ServerApp with its own workers, as the server's process."""
    if os.getsid(0) != os.getpid():
        os.setsid()  # the launcher handles the terminal's Ctrl-C
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    _redirect_output(log_path)
    try:
        _run_server_app(overrides, folder)
    except Exception:
        traceback.print_exc()
        sys.exit(_ERROR)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the launcher may have been killed


def _run_server_app(overrides: Sequence[str], folder: Path) -> None:
    from flwr.app import Context, RecordDict

    from fedhet.conf import fingerprint, versions
    from fedhet.runtimes.local.protocol import Federation
    from fedhet.runtimes.local.worker_grid import WorkerGrid
    from fedhet.server_app.app import main

    recipe = compose_overrides(tuple(overrides))  # before the fork: the workers inherit it
    fingerprint(recipe)  # also before: if files are edited now, all processes have one hash
    versions()
    for library in libraries_of(recipe):
        _import_library(library, recipe)
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
    if recipe.runtime.name == "local":
        from flwr.common.logger import log

        from fedhet.runtimes.local.forked_workers import ForkedWorkers

        if MEMORY.is_dir() and not folder.is_relative_to(MEMORY):
            text = "%s has little room: the workers share models on disk, in %s, which is slower"
            log(logging.INFO, text, MEMORY, folder.parent)
        share = share_of_machine(recipe)
        return ForkedWorkers(share.workers, folder, share.gpus)
    stack.callback(Watchdog(folder, MARK, str(folder)).dismiss)  # ends Ray if this is killed
    os.environ.update({MARK: str(folder), **ray_environment(folder)})
    import ray

    stack.callback(ray.shutdown)  # before the watchdog ends Ray, even if no worker has started
    from fedhet.runtimes.local.ray_workers import RayWorkers

    runtime = recipe.runtime
    workers = RayWorkers(
        cohort_size(recipe),
        int(runtime.client_cpus),
        0.0 if recipe.device == "cpu" else runtime.client_gpus,
        shared_folder=Path(recipe.results_dir) if runtime.simulation else None,
        address=runtime.address,
        num_cpus=cpus_for(recipe),
    )
    signal.signal(signal.SIGTERM, _stop)  # ray.init has installed a handler of its own
    return workers


def _redirect_output(log_path: Path) -> None:
    """Write all output of this process and its children to the log."""
    from fedhet.common.flower.console import write_log_to

    with log_path.open("ab") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    # New objects, because a thread of the launcher may have held the old ones' locks at the fork.
    # The old ones are kept: if one owns descriptor 1 or 2, it closes it when it is collected. Then
    # the next pipe to a worker would have that number, and get everything that is printed.
    _launchers_streams.extend((sys.stdout, sys.stderr))
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    write_log_to(sys.stderr)
    logging.root.handlers.clear()  # Hydra's, for the terminal


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.alarm(_CLEANUP_SECONDS)  # ends this process if the cleanup hangs
    raise SystemExit(f"stopped by signal {number}")
