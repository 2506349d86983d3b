"""Client of a SuperLink's Control API: runs the `flwr` command with its own FLWR_HOME."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedhet.runtimes.deployment.connection import Connection
from fedhet.runtimes.flower_install import LaunchError, flower_program, stage_app
from fedhet.runtimes.processes import start_program
from fedhet.runtimes.run_config import run_config_toml

_NAME = "fedhet"
_SECONDS = 120.0
_UNAVAILABLE = "Connection to the SuperLink is unavailable"


class Unreachable(LaunchError):
    """The SuperLink did not answer; it may later."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Flower's words: pending, starting, running, finished:completed, finished:failed,
    finished:stopped.
    """

    status: str
    details: str = ""  # why it failed

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")

    @property
    def is_completed(self) -> bool:
        """Whether the run has ended well."""
        return self.status == "finished:completed"


class Control:
    """Submits, lists and stops runs of a SuperLink.

    The `flwr` processes keep their files in ``folder`` and run in ``environment``, by default this
    process's.
    """

    def __init__(
        self, connection: Connection, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder, self._empty = folder, folder / "empty"
        home = folder / "home"
        for each in (home, self._empty):
            each.mkdir(exist_ok=True)
        (home / "config.toml").write_text(_config(connection), encoding="utf-8")
        self._environment = flower_environment(
            home, connection.host, os.environ if environment is None else environment
        )

    def online_nodes(self) -> int:
        """Return the number of connected SuperNodes."""
        nodes = self._ask("supernode", "list", _NAME)["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def start(self, overrides: Sequence[str], code: Sequence[Path]) -> int:
        """Submit a run of the app with these overrides and the user's code; return its id."""
        return int(self._ask(*self._run(overrides, code))["run-id"])

    def start_simulation(
        self, overrides: Sequence[str], code: Sequence[Path], federation: str, output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Submit a run to a SuperLink for simulations; the process writes its log to ``output``."""
        words = [*self._run(overrides, code), "--stream", "--federation-config", federation]
        return self._popen(words, output, subprocess.STDOUT)

    def status(self, run_id: int) -> RunStatus | None:
        """Return a run's status, None if the SuperLink does not know the run."""
        try:
            [run] = self._ask("list", _NAME, "--run-id", str(run_id))["runs"]
        except Unreachable:
            raise
        except LaunchError as error:
            if "not found" in str(error).lower():
                return None
            raise
        return _status(run)

    def last_status(self) -> RunStatus | None:
        """Return the status of the newest run, None if there is no run."""
        runs = self._ask("list", _NAME)["runs"]
        return _status(runs[0]) if runs else None

    def stop(self, run_id: int) -> None:
        """Stop a run."""
        self._ask("stop", str(run_id), _NAME)

    def stream_log(self, run_id: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Write a run's log from its beginning to ``output``; the process ends with the run."""
        words = ["log", str(run_id), _NAME, "--stream"]
        return self._popen(words, output, subprocess.DEVNULL)

    def _run(self, overrides: Sequence[str], code: Sequence[Path]) -> list[str]:
        run_file = self._folder / "run.toml"
        run_file.write_text(run_config_toml(overrides), encoding="utf-8")
        return ["run", str(stage_app(self._folder, code)), _NAME, "--run-config", str(run_file)]

    def _popen(
        self, words: Sequence[str], stdout: int | IO[bytes], stderr: int
    ) -> subprocess.Popen[bytes]:
        words = [flower_program("flwr"), *words]
        return start_program(words, self._environment, self._empty, stdout, stderr)

    def _ask(self, *words: str) -> dict[str, Any]:
        process = self._popen([*words, "--format", "json"], subprocess.PIPE, subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise Unreachable(f"flwr {words[0]} got no answer for {_SECONDS:.0f} s") from None
        finally:
            process.kill()
            process.wait()
        try:
            answer = dict(json.loads(output))
        except ValueError:
            answer = {}
        if process.returncode == 0 and answer.get("success"):
            return answer
        said = answer.get("error-message") or (output + errors).decode(errors="replace")
        message = " ".join(str(said).split())
        kind = Unreachable if _UNAVAILABLE in message else LaunchError
        raise kind(f"flwr {words[0]}: {message}")


def flower_environment(home: Path, host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Flower's programs that uses no proxy for the SuperLink's host."""
    hosts = ",".join(filter(None, [host, environment.get("NO_PROXY")]))
    return {
        **environment,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": hosts,
        "no_proxy": hosts,
        "PYTHONUNBUFFERED": "1",
    }


def _status(run: Mapping[str, Any]) -> RunStatus:
    details = str(run["status-details"])
    return RunStatus(str(run["status"]), "" if details == "N/A" else details)


def _config(connection: Connection) -> str:
    """Return Flower's config.toml for one connection; a JSON string is valid TOML."""
    values: dict[str, str | bool] = {
        "address": connection.address,
        "root-certificates": connection.root_certificates,
        "insecure": connection.insecure,
        "federation": connection.federation,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value]
    return "\n".join([f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]', *lines, ""])
