"""The services of docker/federation.yaml as processes of this machine.

Commands, environment and health checks are those of the file and the Dockerfile; the files that
Docker would mount into a container are used where they lie on the host. Each network namespace gets
a loopback address of its own (127.a.b.n, Linux), so that the ports are those of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from fedhet.common.files import last_lines
from fedhet.runtimes.run_config import run_config_toml
from tests.compose import DOCKER, Service, names_seen_by, services
from tests.processes import SECONDS, kill_all, marked
from tests.tunnel import stand_in_for_nginx

ROOT = DOCKER.parent
BIN = Path(sys.executable).parent
MARK = "FEDHET_DEPLOYED"
CONTAINER = "FEDHET_CONTAINER"
ACTIVATED = "SuperNode ID: "  # in a SuperNode's log, once the SuperLink has accepted it
SITES = range(3)
MARKS = [
    pytest.mark.flower,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.0/8 on loopback"),
]
RECIPE = [
    "task=digits",
    "clients=3",
    "rounds=2",
    "local.epochs=2",
    "local.lr=0.2",
    "local.batch_size=64",
    "runtime.channels_last=false",
]
IMAGE = {"/app/start.py": DOCKER / "start.py", "/app/health.py": DOCKER / "health.py"}
IMAGE |= {"/app/keys.py": DOCKER / "keys.py", "/app": ROOT}


def make_keys(folder: Path, *words: str) -> None:
    """Make keys of somebody else's, in a folder, with docker/keys.py."""
    command = [sys.executable, str(DOCKER / "keys.py"), *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


class Loopback:
    """The network of a federation: a loopback address for each network namespace."""

    def __init__(self, all_services: Mapping[str, Service]) -> None:
        self._services = all_services
        first = [127, random.randint(1, 254), random.randint(1, 254)]
        owners = [one.name for one in all_services.values() if one.shares_network_of is None]
        self._addresses = {
            name: ".".join(map(str, [*first, number])) for number, name in enumerate(owners, 1)
        }

    def open(self) -> None:
        with socket.socket() as probe:
            probe.bind((self.address("network"), 9092))

    def address(self, service: str) -> str:
        return self._addresses[service]

    def translated(self, text: str, service: Service) -> str:
        """Return a word of the file with the addresses of this machine."""
        own = self.address(service.shares_network_of or service.name)
        seen = names_seen_by(service, self._services)
        known = {name: self.address(other) for name, (_, other) in seen.items()}
        known |= {"0.0.0.0": own, "127.0.0.1": own}
        pattern = rf"(?<![\w.-])({'|'.join(map(re.escape, known))})(?=:\d|$)"
        return re.sub(pattern, lambda found: known[found[1]], text)


class Deployment:
    """A running federation below FEDHET_DIR; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, **settings: str) -> None:  # of .env
        self.folder = folder
        known = {"FEDHET_DIR": str(folder), **settings}
        self.services = services(DOCKER / "federation.yaml", known)
        self.network = Loopback(self.services)
        self._mark = uuid.uuid4().hex
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Deployment:
        """Make the keys, start all services as Compose would, and wait until they are healthy."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.network.open()
            self.make_keys()
            executors = ["serverapp", *(f"clientapp-{site}" for site in SITES)]
            self.start("superlink", "gate", *executors)
            self.wait_until_healthy("superlink", "gate")
            self.checked("register")
            self.start_and_wait(*(f"supernode-{site}" for site in SITES))
            self.wait_until_healthy(*executors)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._running.values():
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._running.values():
                process.wait(timeout=5)
        kill_all(self.left)
        for process in self._running.values():
            process.wait()

    def left(self) -> list[psutil.Process]:
        return marked(MARK, self._mark)

    def all_processes(self) -> list[psutil.Process]:
        return self.left()

    # ---- the operator's commands -----------------------------------------------------------------

    def make_keys(self) -> None:
        """Make all keys, and the folders that the compose file mounts."""
        names = [self.network.address("network")]
        for words in (["federation", str(len(SITES))], ["server", *names]):
            self.checked("keys", *words)
        config = self.folder / "server" / "state" / "flwr" / "config.toml"
        translated = self.translated(config.read_text(), self.services["superlink"])
        config.write_text(translated)

    def start(self, *names: str) -> None:
        """Start services; their output goes to NAME.log."""
        for name in names:
            service = self.services[name]
            self._running[name] = self.process(service, service.words, self.log_path(name))

    def start_and_wait(self, *names: str) -> None:
        self.start(*names)
        self.wait_until_healthy(*names)

    def stop(self, name: str) -> int:
        self._running[name].terminate()
        return self._running.pop(name).wait(timeout=30)

    def kill(self, *names: str) -> None:
        """Kill containers, that is all processes in them (docker kill)."""
        for name in names:
            kill_all(partial(self.processes, name))
            self._running.pop(name).wait()

    def pause(self, *names: str) -> None:
        self._signal(signal.SIGSTOP, *names)

    def unpause(self, *names: str) -> None:
        self._signal(signal.SIGCONT, *names)

    def _signal(self, number: int, *names: str) -> None:
        for process in (process for name in names for process in self.processes(name)):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return a container's processes, also those that have overwritten their environment."""
        found = {one for one in self.left() if one.environ().get(CONTAINER) == name}
        with contextlib.suppress(KeyError, psutil.Error):
            first = psutil.Process(self._running[name].pid)
            found |= {first, *first.children(recursive=True)}
        return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def restart_supernode(self, name: str) -> tuple[float, int]:
        """Start a SuperNode until it is accepted, as Docker does; return seconds and tries."""
        began, tries = time.monotonic(), 0
        while time.monotonic() - began < SECONDS:
            tries += 1
            self.start(name)
            while self._running[name].poll() is None:
                # its health check would find the connections of the others on this host
                if ACTIVATED in self.log(name):
                    return time.monotonic() - began, tries
                time.sleep(0.5)
            time.sleep(min(0.1 * 2**tries, 60.0))  # Docker's own delays
        raise AssertionError(f"{name} is not accepted after {tries} tries:\n{self.said()}")

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a service that ends (docker compose run), with these words as its command."""
        service = self.services[name]
        entrypoint = service.settings["entrypoint"] or []
        return self.execute(name, *(entrypoint + list(words) if words else service.words))

    def checked(self, name: str, *words: str) -> str:
        done = self.run(name, *words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def execute(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container (docker compose exec)."""
        return self.execute_as(self.services[name], *words)

    def execute_as(self, service: Service, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container that the compose file need not have."""
        log = self.folder / f"{service.name}.{uuid.uuid4().hex[:6]}.log"
        process = self.process(service, words, log)
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{words} takes more than {SECONDS} s:\n{self.said()}") from None
        return subprocess.CompletedProcess(list(words), code, log.read_text(), "")

    def flwr_run(
        self, words: Sequence[str], results: str, app: str, *flags: str
    ) -> subprocess.CompletedProcess[str]:
        """Submit a recipe with `flwr run`; the results are below /results."""
        recipe = [*words, "runtime.simulation=false", f"results_dir=/results/{results}"]
        serverapp = self.services["serverapp"]
        recipe = [self.translated(word, serverapp) for word in recipe]
        path = self.folder / "server" / "state" / "run.toml"
        path.write_text(run_config_toml(recipe))
        command = ["flwr", "run", app, "fedhet", *flags, "--run-config", "/state/run.toml"]
        return self.execute("superlink", *command)

    def run_status(self, run_id: int) -> tuple[str, str]:
        (run,) = self.listed("list", "fedhet", "--run-id", str(run_id))["runs"]
        return run["status"], run["status-details"]

    def nodes(self) -> list[dict]:
        return self.listed("supernode", "list", "fedhet")["nodes"]

    def listed(self, *words: str) -> dict:
        done = self.execute("superlink", "flwr", *words, "--format", "json")
        assert done.returncode == 0, done.stdout
        return json.loads(done.stdout[done.stdout.index("{") :])

    # ---- health and logs -------------------------------------------------------------------------

    def is_healthy(self, name: str) -> bool:
        service = self.services[name]
        kind, *words = service.health
        assert kind == "CMD"
        return self.execute(name, *words).returncode == 0

    def wait_until_healthy(self, *names: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        for name in names:
            while not self.is_healthy(name):
                ended = self._running[name].poll() is not None
                assert not ended, f"{name} has ended:\n{self.said()}"
                assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.said()}"
                time.sleep(0.5)

    def log(self, name: str) -> str:
        """Return what a service has said since its last start."""
        return self.log_path(name).read_text(errors="replace")

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self) -> str:
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{last_lines(path, 12)}" for path in paths)

    # ---- a container as a process ----------------------------------------------------------------

    def process(self, service: Service, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        command = [self.translated(word, service) for word in words]
        if command[0] == "python":
            command[0] = sys.executable
        temporary = self._sources(service)["/tmp"]
        temporary.mkdir(parents=True, exist_ok=True)
        folder = service.settings.get("working_dir")
        with log.open("wb") as out:
            return subprocess.Popen(
                command,
                env=self.environment(service),
                cwd=self.translated(folder, service) if folder else temporary,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def environment(self, service: Service) -> dict[str, str]:
        """Return a service's environment; it has PATH and OpenMP's limits of this process."""
        own = {key: self.translated(value, service) for key, value in service.environment.items()}
        nginx = stand_in_for_nginx(self.folder / "bin")
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath), str(nginx)])
        proxy = {"no_proxy": "*", "NO_PROXY": "*"}
        image = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        image |= {key: value for key, value in os.environ.items() if key.startswith("OMP_")}
        marks = {MARK: self._mark, CONTAINER: service.name}
        return {**image, **marks, **proxy, **own}

    def translated(self, text: str, service: Service) -> str:
        """Return a word of a service with this machine's addresses and paths."""
        text = self.network.translated(text, service)
        sources = self._sources(service)
        targets = "|".join(re.escape(one) for one in sorted(sources, key=len, reverse=True))
        pattern = rf"""(?<![\w/.-])({targets})(?=[/"\s]|$)"""
        return re.sub(pattern, lambda found: str(sources[found[1]]), text)

    def _sources(self, service: Service) -> dict[str, Path]:
        mounts: dict[str, Path | None] = {"/tmp": None, **service.mounts}
        if service.name.startswith("supernode-"):  # the node config's paths are its executor's
            executor = self.services[service.name.replace("supernode", "clientapp")]
            mounts = {**executor.mounts, **mounts}
        temporary = self.folder / "tmpfs" / service.name
        return IMAGE | {
            target: source or temporary / target.strip("/") for target, source in mounts.items()
        }
