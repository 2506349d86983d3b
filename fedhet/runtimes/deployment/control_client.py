"""What can be asked of a SuperLink: the `flwr` command with a FLWR_HOME of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedhet.runtimes.deployment.connection import Connection
from fedhet.runtimes.flower_install import LaunchError, flower_program, stage_app
from fedhet.runtimes.processes import end_with_parent
from fedhet.runtimes.run_config import run_config_toml

_NAME = "fedhet"
_SECONDS = 120.0
_UNAVAILABLE = "Connection to the SuperLink is unavailable"


class Unreachable(LaunchError):
    """The SuperLink did not answer; it may later."""


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands.

    Attributes:
        status: Flower's word: pending, starting, running, finished:completed, finished:failed,
            finished:stopped.
        details: why it has failed; "" otherwise.
    """

    status: str
    details: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")

    @property
    def is_completed(self) -> bool:
        """Whether the run has ended well."""
        return self.status == "finished:completed"


class Control:
    """A SuperLink's Control.

    Args:
        connection: where it is.
        folder: empty; of this object alone.
    """

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._folder = folder
        home, self._empty = folder / "home", folder / "empty"
        home.mkdir()
        self._empty.mkdir()
        (home / "config.toml").write_text(_config(connection), encoding="utf-8")
        hosts = ",".join(filter(None, [connection.host, os.environ.get("NO_PROXY")]))
        self._environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": hosts,
            "no_proxy": hosts,
            "PYTHONUNBUFFERED": "1",
        }

    def online_nodes(self) -> int:
        """Return how many SuperNodes are connected."""
        nodes = self._ask("supernode", "list", _NAME)["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def start(self, overrides: Sequence[str]) -> int:
        """Submit a run of the app with the recipe of these overrides; return its id."""
        run_file = self._folder / "run.toml"
        run_file.write_text(run_config_toml(overrides), encoding="utf-8")
        app = stage_app(self._folder)
        answer = self._ask("run", str(app), _NAME, "--run-config", str(run_file))
        return int(answer["run-id"])

    def status(self, run_id: int) -> RunStatus | None:
        """Return where a run stands, None if the SuperLink does not know it."""
        try:
            [run] = self._ask("list", _NAME, "--run-id", str(run_id))["runs"]
        except Unreachable:
            raise
        except LaunchError as error:
            if "not found" in str(error).lower():
                return None
            raise
        details = str(run["status-details"])
        return RunStatus(str(run["status"]), "" if details == "N/A" else details)

    def stop(self, run_id: int) -> None:
        """Stop a run."""
        self._ask("stop", str(run_id), _NAME)

    def stream_log(self, run_id: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start to write a run's log to ``output``, from its beginning; ends when the run does."""
        return subprocess.Popen(
            [flower_program("flwr"), "log", str(run_id), _NAME, "--stream"],
            env=self._environment,
            cwd=self._empty,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is the launcher's to answer
            preexec_fn=end_with_parent,
        )

    def _ask(self, *words: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [flower_program("flwr"), *words, "--format", "json"],
                env=self._environment,
                cwd=self._empty,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(f"flwr {words[0]} has no answer after {_SECONDS:.0f} s") from None
        said = done.stdout + done.stderr
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {}
        if done.returncode == 0 and answer.get("success"):
            return dict(answer)
        message = " ".join(str(answer.get("error-message") or said).split())
        kind = Unreachable if _UNAVAILABLE in message else LaunchError
        raise kind(f"flwr {words[0]}: {message}")


def _config(connection: Connection) -> str:
    """Return Flower's config.toml for one connection; a JSON string is a TOML one."""
    values: dict[str, str | bool] = {
        "address": connection.address,
        "root-certificates": connection.root_certificates,
        "insecure": connection.insecure,
        "federation": connection.federation,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value]
    return "\n".join([f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]', *lines, ""])
