"""One run in Flower's simulation, with a SuperLink of its own.

`flwr run` by itself starts one SuperLink for all runs of a user and leaves it running: it keeps the
working directory of its first caller, runs on a fixed port, and answers 0 for a failed run. Here a
run has its own: a free port, a FLWR_HOME and an empty working directory below one temporary folder,
and all of it is gone when the run is over.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
from omegaconf import DictConfig

from common.files import last_lines
from fedhet.runtimes.flower_install import PROGRAMS, LaunchError, flower_program, stage_app
from fedhet.runtimes.processes import (
    NOTHING_LEFT,
    ProcessTree,
    Watchdog,
    adopt_orphans,
    end_with_parent,
    ray_environment,
)
from fedhet.runtimes.run_config import federation_config, run_config_toml

_CONNECTION = "fedhet"
_START_SECONDS = 60.0
_LONGEST_FOLDER = 17  # Ray puts Unix sockets some 75 characters below; the system's limit is 107


class Simulation:
    """A SuperLink and the one run on it; a context manager that leaves no process behind."""

    def __init__(self, log_path: Path) -> None:
        """Prepare a simulation whose log goes to ``log_path``."""
        self.log_path = log_path
        self._port = 0
        self._client: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Simulation:
        """Start the SuperLink."""
        adopt_orphans()
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"fedhet-{os.getpid()}-", dir=_temporary_folder())
        ).resolve()
        self._home = self._folder / "home"
        self._neutral = self._folder / "empty"
        self._home.mkdir()
        self._neutral.mkdir()
        self._environment = self._child_environment()
        self._watchdog = Watchdog(self._folder, "FLWR_HOME", str(self._home))
        self._process_tree = ProcessTree("FLWR_HOME", str(self._home))
        try:
            self._start_superlink()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every process of the run and remove the temporary folder."""
        self.close()

    def close(self) -> None:
        """End every process of the run and remove the temporary folder."""
        self._process_tree.end()
        self._watchdog.dismiss()
        shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Hand the app over with `flwr run`, which from then on writes the run's log.

        Args:
            recipe: the composed recipe.
            overrides: what the apps compose it from.
        """
        run_file = self._folder / "run.toml"
        run_file.write_text(run_config_toml(overrides), encoding="utf-8")
        app = stage_app(self._folder)
        words = ["run", str(app), _CONNECTION, "--stream", "--run-config", str(run_file)]
        with self.log_path.open("ab") as log:
            words += ["--federation-config", federation_config(recipe)]
            self._client = self._start("flwr", *words, log=log)

    def running(self) -> bool:
        """Return whether the run goes on."""
        assert self._client is not None
        return self._client.poll() is None

    def failure(self) -> str:
        """Return why the run ended, as Flower has it.

        Raises:
            LaunchError: if `flwr run` did not even get the run accepted.
        """
        answer = subprocess.run(
            [flower_program("flwr"), "list", _CONNECTION, "--format", "json"],
            env=self._environment,
            cwd=self._neutral,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            runs = json.loads(answer.stdout)["runs"]
        except (ValueError, KeyError):
            tail = self._superlink_tail()
            raise LaunchError(f"Flower's SuperLink does not answer: {tail}") from None
        if not runs:
            raise LaunchError(f"Flower refused the run: {last_lines(self.log_path, 3)}")
        status, details = str(runs[0]["status"]), str(runs[0]["status-details"])
        if status == "finished:completed":
            return "Flower calls the run completed, but it has written no summary.json"
        return details if details != "N/A" else status

    def interrupted(self) -> str:
        """Return what is left of the run when the user has stopped the launcher."""
        return NOTHING_LEFT

    def _child_environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        environment |= {
            "FLWR_HOME": str(self._home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            # Flower and Ray find each other's programs by PATH: they must be this environment's.
            "PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)]),
            "NO_PROXY": ",".join(filter(None, ["127.0.0.1", os.environ.get("NO_PROXY")])),
            "no_proxy": ",".join(filter(None, ["127.0.0.1", os.environ.get("no_proxy")])),
            "PYTHONUNBUFFERED": "1",
            **ray_environment(self._folder),
        }
        if "FEDHET_DATA" in environment:
            data = Path(environment["FEDHET_DATA"]).expanduser().absolute()
            environment["FEDHET_DATA"] = str(data)
        return environment

    def _start(self, program: str, *words: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [flower_program(program), *words],
            env=self._environment,
            cwd=self._neutral,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is the launcher's to answer
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # it is not to end a round itself
        )

    def _start_superlink(self) -> None:
        for _ in range(3):  # another process may take the port between the asking and the binding
            self._port = _free_port()
            with (self._folder / "superlink.log").open("wb") as log:
                superlink = self._start(
                    "flower-superlink",
                    *("--insecure", "--simulation", "--isolation", "subprocess"),
                    *("--host", "127.0.0.1", "--port", str(self._port)),
                    log=log,
                )
            if self._wait_until_up(superlink):
                break
        else:
            raise LaunchError(f"Flower's SuperLink does not start: {self._superlink_tail()}")
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )

    def _wait_until_up(self, superlink: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while superlink.poll() is None and time.monotonic() < deadline:
            if _listens(superlink.pid, self._port) and _is_healthy(self._port):
                return True
            time.sleep(0.05)
        return False

    def _superlink_tail(self) -> str:
        return last_lines(self._folder / "superlink.log", 5)


def _temporary_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER or not os.access("/tmp", os.W_OK) else "/tmp"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()
