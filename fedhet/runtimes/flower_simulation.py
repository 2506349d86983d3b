"""One run in Flower's simulation, with a SuperLink of its own.

The SuperLink of a plain `flwr run` serves all runs of a user on a fixed port, and keeps running.
This one has a free port, and its own FLWR_HOME and empty working directory in a temporary folder,
and ends with the run.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil
from omegaconf import DictConfig

from fedhet.common.files import last_lines
from fedhet.conf.project import travelling_code
from fedhet.runtimes.deployment.connection import Connection
from fedhet.runtimes.deployment.control_client import Control, flower_environment
from fedhet.runtimes.flower_install import PROGRAMS, LaunchError, flower_program
from fedhet.runtimes.processes import (
    NOTHING_LEFT,
    ProcessTree,
    Watchdog,
    adopt_orphans,
    ray_environment,
    start_program,
)
from fedhet.runtimes.run_config import federation_config

_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_MAX_FOLDER = 17  # characters; Ray puts Unix sockets 75 below, and Linux allows 107


class Simulation:
    """A SuperLink and the one run on it; the context manager leaves no process behind."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._client: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the SuperLink."""
        adopt_orphans()
        usual = tempfile.gettempdir()
        short = len(usual) <= _MAX_FOLDER or not os.access("/tmp", os.W_OK)
        folder = tempfile.mkdtemp(prefix=f"fedhet-{os.getpid()}-", dir=usual if short else "/tmp")
        self._folder = Path(folder).resolve()
        home = self._folder / "home"
        (self._folder / "empty").mkdir()
        home.mkdir()
        self._environment = _environment(self._folder)
        self._watchdog = Watchdog(self._folder, "FLWR_HOME", str(home))
        self._process_tree = ProcessTree("FLWR_HOME", str(home))
        try:
            connection = Connection(f"{_HOST}:{self._start_superlink()}", insecure=True)
            self._control = Control(connection, self._folder, self._environment)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End every process of the run and remove the temporary folder."""
        self._process_tree.end()
        self._watchdog.dismiss()
        shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Start the run with `flwr run`, which writes its log."""
        with self.log_path.open("ab") as log:
            federation = federation_config(recipe)
            code = travelling_code(recipe)
            self._client = self._control.start_simulation(overrides, code, federation, log)

    def running(self) -> bool:
        """Return whether the run has not ended yet."""
        assert self._client is not None
        return self._client.poll() is None

    def failure(self) -> str:
        """Return why the run ended, in Flower's words; raise if Flower did not accept it."""
        try:
            status = self._control.last_status()
        except LaunchError as error:
            raise LaunchError(f"{error}; its log: {self._superlink_log()}") from error
        if status is None:
            raise LaunchError(f"Flower rejected the run: {last_lines(self.log_path, 3)}")
        if status.is_completed:
            return "Flower reports the run as completed, but it wrote no summary.json"
        return status.details or status.status

    def continues(self) -> bool:
        """Return whether the run continues after the launcher was stopped."""
        return False

    def interrupted(self) -> str:
        """Say what remains of the run after the user has stopped the launcher."""
        return NOTHING_LEFT

    def _start_superlink(self) -> int:
        """Start the SuperLink and return its port."""
        for _ in range(3):  # another process may take the port first
            port = _free_port()
            with (self._folder / "superlink.log").open("wb") as log:
                words = [flower_program("flower-superlink"), "--insecure", "--simulation"]
                words += ["--isolation", "subprocess", "--host", _HOST, "--port", str(port)]
                empty = self._folder / "empty"
                superlink = start_program(words, self._environment, empty, log, subprocess.STDOUT)
            deadline = time.monotonic() + _START_SECONDS
            while superlink.poll() is None and time.monotonic() < deadline:
                if _is_healthy(superlink.pid, port):
                    return port
                time.sleep(0.05)
        raise LaunchError(f"Flower's SuperLink does not start: {self._superlink_log()}")

    def _superlink_log(self) -> str:
        return last_lines(self._folder / "superlink.log", 5)


def _environment(folder: Path) -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    if "FEDHET_DATA" in found:
        found["FEDHET_DATA"] = str(Path(found["FEDHET_DATA"]).expanduser().absolute())
    return {
        **flower_environment(folder / "home", _HOST, found),
        **ray_environment(folder),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        # Flower and Ray find each other's programs by PATH, which must name this environment.
        "PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)]),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_healthy(pid: int, port: int) -> bool:
    """Return whether this process, and no other, serves the SuperLink's health at the port."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=2)
    try:
        there = psutil.Process(pid).net_connections(kind="tcp")
        if not any(o.status == psutil.CONN_LISTEN and o.laddr.port == port for o in there):
            return False
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, psutil.Error):
        return False
    finally:
        connection.close()
