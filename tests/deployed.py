"""A federation of docker/federation.yaml as processes of this machine, started from that file.

Every command, environment and health check is the file's (and the Dockerfile's); what Docker would
mount into a container is found where it lies on the host. Each network namespace gets a loopback
address of its own (127.a.b.n, Linux), so that ports stay as they are in the file.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

import psutil
import pytest

from common.files import last_lines
from fedhet.runtimes.run_config import run_config_toml
from tests.compose import DOCKER, Service, names_seen_by, services

ROOT = DOCKER.parent
BIN = Path(sys.executable).parent
MARK = "FEDHET_DEPLOYED"
CONTAINER = "FEDHET_CONTAINER"
ACTIVATED = "SuperNode ID: "  # a SuperNode says so when the SuperLink has let it in
SECONDS = 600  # for what takes half a minute on an idle machine
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


class Network(Protocol):
    """Where the containers' network namespaces are on this machine."""

    def open(self) -> None:
        """Make them."""

    def close(self) -> None:
        """Remove them."""

    def prefix(self, service: Service) -> list[str]:
        """Return the words that start a command in a service's namespace."""

    def translated(self, text: str, service: Service) -> str:
        """Return a word with the addresses that it has here."""

    def server_names(self) -> list[str]:
        """Return what the server is called by here, and not in the compose file."""


class Loopback:
    """A loopback address for each namespace."""

    def __init__(self, all_services: Mapping[str, Service]) -> None:
        """Choose addresses that nobody listens on."""
        self._services = all_services
        first = [127, random.randint(1, 254), random.randint(1, 254)]
        owners = [one.name for one in all_services.values() if one.shares_network_of is None]
        self._addresses = {
            name: ".".join(map(str, [*first, number])) for number, name in enumerate(owners, 1)
        }

    def open(self) -> None:
        """See that nobody listens at the server's address."""
        with socket.socket() as probe:
            probe.bind((self.address("network"), 9092))

    def close(self) -> None:
        """Leave it as it is."""

    def address(self, namespace: str) -> str:
        """Return the address of a service that has a namespace of its own."""
        return self._addresses[namespace]

    def prefix(self, service: Service) -> list[str]:
        """Return no words: all run in this machine's namespace."""
        return []

    def translated(self, text: str, service: Service) -> str:
        """Return a word with names, 0.0.0.0 and 127.0.0.1 replaced."""
        own = self.address(service.shares_network_of or service.name)
        seen = names_seen_by(service, self._services)
        known = {name: self.address(other) for name, (_, other) in seen.items()}
        known |= {"0.0.0.0": own, "127.0.0.1": own}
        pattern = rf"(?<![\w.-])({'|'.join(map(re.escape, known))})(?=:\d|$)"
        return re.sub(pattern, lambda found: known[found[1]], text)

    def server_names(self) -> list[str]:
        """Return the server's address."""
        return [self.address("network")]


class Deployment:
    """The containers of a compose file as processes; a context manager that leaves none."""

    def __init__(
        self, folder: Path, network: Callable[[Mapping[str, Service]], Network] = Loopback
    ) -> None:
        """Read the compose file; make nothing yet.

        Args:
            folder: FEDHET_DIR; made if need be.
            network: where the services run.
        """
        self.folder = folder
        self.services = services(DOCKER / "federation.yaml", {"FEDHET_DIR": str(folder)})
        self.network = network(self.services)
        self._mark = uuid.uuid4().hex
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Deployment:
        """Make the keys, start all services in their order, and wait until they are well."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.network.open()
            self.make_keys()
            self.start_and_wait("superlink")
            done = self.run("register")
            assert done.returncode == 0, done.stdout
            self.start_and_wait("serverapp", *(f"supernode-{site}" for site in SITES))
            self.start_and_wait(*(f"clientapp-{site}" for site in SITES))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes."""
        self.close()

    def close(self) -> None:
        """End every process that was started, and those that they have started."""
        for process in self._running.values():
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._running.values():
                process.wait(timeout=5)
        while left := self.left():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
        for process in self._running.values():
            process.wait()
        self.network.close()

    def left(self) -> list[psutil.Process]:
        """Return the processes of this deployment that are alive."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:  # another's, or gone meanwhile
            return False

    # ---- what the operator does ------------------------------------------------------------------

    def make_keys(self) -> None:
        """Make all keys, and the folders that the compose file mounts."""
        for words in (["federation", str(len(SITES))], ["server", *self.network.server_names()]):
            done = self.run("keys", *words)
            assert done.returncode == 0, done.stdout
        config = self.folder / "server" / "state" / "flwr" / "config.toml"
        translated = self.translated(config.read_text(), self.services["superlink"])
        config.write_text(translated)

    def make_site(self, folder: Path, name: str) -> None:
        """Make a site's keys as a site does, in site/keys/ of a folder."""
        self._make(folder, "site", name)

    def make_authority(self, folder: Path) -> None:
        """Make another server's keys, in server/keys/ of a folder."""
        self._make(folder, "server", "fl.example.org")

    def _make(self, folder: Path, *words: str) -> None:
        command = [sys.executable, str(DOCKER / "keys.py"), *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    def start(self, *names: str) -> None:
        """Start services; their output goes to NAME.log."""
        for name in names:
            service = self.services[name]
            self._running[name] = self.process(service, service.words, self.log_path(name))

    def edit(self, name: str, words: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Change a service as an operator would in the file: words, and further variables."""
        service = self.services[name]
        assert set(words) <= set(service.words)
        self.services[name] = replace(
            service,
            words=tuple(words.get(word, word) for word in service.words),
            environment={**service.environment, **environment},
        )

    def start_and_wait(self, *names: str) -> None:
        """Start services and wait until they are well."""
        self.start(*names)
        self.wait_until_healthy(*names)

    def stop(self, name: str) -> int:
        """Stop a service politely; return its exit code."""
        self._running[name].terminate()
        return self._running.pop(name).wait(timeout=30)

    def kill(self, *names: str) -> None:
        """Kill containers, that is all processes in them (docker kill)."""
        for name in names:
            while inside := self.processes(name):
                for process in inside:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(inside, timeout=5)
            self._running.pop(name).wait()

    def restart_ended(self, seconds: float) -> list[str]:
        """Start what ends by itself, as Docker's `restart` does; return the names.

        Args:
            seconds: how long to wait for the first.
        """
        end, names = time.monotonic() + seconds, list[str]()
        while not names and time.monotonic() < end:
            time.sleep(0.5)
            names = [name for name, process in self._running.items() if process.poll() is not None]
        for name in names:
            if name.startswith("supernode"):
                self.restart_supernode(name)
            else:
                self.start_and_wait(name)
        return names

    def pause(self, *names: str) -> None:
        """Freeze containers (docker pause)."""
        self._signal(signal.SIGSTOP, names)

    def unpause(self, *names: str) -> None:
        """Let frozen containers go on."""
        self._signal(signal.SIGCONT, names)

    def _signal(self, number: int, names: Sequence[str]) -> None:
        for process in (process for name in names for process in self.processes(name)):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes in a container."""
        return [process for process in self.left() if process.environ().get(CONTAINER) == name]

    def restart_supernode(self, name: str) -> tuple[float, int]:
        """Start a SuperNode as Docker's `restart` does: again whenever it ends, until it is in.

        Returns:
            how many seconds that took, and how many tries.
        """
        began, tries = time.monotonic(), 0
        while time.monotonic() - began < SECONDS:
            tries += 1
            self.start(name)
            while self._running[name].poll() is None:
                # not its health check, which finds the others' connections where all share a host
                if ACTIVATED in self.log_path(name).read_text(errors="replace"):
                    return time.monotonic() - began, tries
                time.sleep(0.5)
            time.sleep(min(0.1 * 2**tries, 60.0))  # Docker's own delays
        raise AssertionError(f"{name} is not in after {tries} tries:\n{self.said()}")

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a service that ends (docker compose run), with these words as its command if any."""
        service = self.services[name]
        entrypoint = service.settings.get("entrypoint", [])
        return self.execute(name, *(entrypoint + list(words) if words else service.words))

    def execute(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container (docker compose exec)."""
        return self.execute_as(self.services[name], *words)

    def execute_as(self, service: Service, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container that need not be the compose file's."""
        log = self.folder / f"{service.name}.{uuid.uuid4().hex[:6]}.log"
        process = self.process(service, words, log)
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{words} takes more than {SECONDS} s:\n{self.said()}") from None
        return subprocess.CompletedProcess(list(words), code, log.read_text(), "")

    def submit(self, words: Sequence[str], results: str) -> dict:
        """Run a recipe with `flwr run`, and return its summary.

        Args:
            words: the recipe's.
            results: the folder below /results.
        """
        done = self.flwr_run(words, results, "/app", "--stream")
        summary = self.folder / "server" / "results" / results / "summary.json"
        assert summary.exists(), f"{done.stdout}\n{self.said()}"
        return json.loads(summary.read_text())

    def flwr_run(
        self, words: Sequence[str], results: str, app: str, *flags: str
    ) -> subprocess.CompletedProcess[str]:
        """Submit a recipe.

        Args:
            words: the recipe's.
            results: the folder below /results.
            app: the folder of the app.
            flags: further ones of `flwr run`.
        """
        recipe = [*words, "runtime.simulation=false", f"results_dir=/results/{results}"]
        serverapp = self.services["serverapp"]
        recipe = [self.translated(word, serverapp) for word in recipe]
        path = self.folder / "server" / "state" / "run.toml"
        path.write_text(run_config_toml(recipe))
        command = ["flwr", "run", app, "fedhet", *flags, "--run-config", "/state/run.toml"]
        return self.execute("superlink", *command)

    def run_status(self, run_id: int) -> tuple[str, str]:
        """Return a run's status and its details as `flwr list` has them."""
        words = ["flwr", "list", "fedhet", "--run-id", str(run_id), "--format", "json"]
        done = self.execute("superlink", *words)
        assert done.returncode == 0, done.stdout
        (run,) = json.loads(done.stdout[done.stdout.index("{") :])["runs"]
        return run["status"], run["status-details"]

    def nodes(self) -> list[dict]:
        """Return the registered SuperNodes as `flwr supernode list` has them."""
        done = self.execute("superlink", "flwr", "supernode", "list", "fedhet", "--format", "json")
        assert done.returncode == 0, done.stdout
        return json.loads(done.stdout[done.stdout.index("{") :])["nodes"]

    # ---- health and logs -------------------------------------------------------------------------

    def is_healthy(self, name: str) -> bool:
        """Return what the service's health check says."""
        service = self.services[name]
        kind, *words = service.health
        assert kind == "CMD"
        return self.execute(name, *words).returncode == 0

    def wait_until_healthy(self, *names: str, seconds: float = SECONDS) -> None:
        """Wait for health checks; raises where a service ends or does not become well."""
        deadline = time.monotonic() + seconds
        for name in names:
            while not self.is_healthy(name):
                ended = self._running[name].poll() is not None
                assert not ended, f"{name} has ended:\n{self.said()}"
                assert time.monotonic() < deadline, f"{name} is not well:\n{self.said()}"
                time.sleep(2.0)

    def log_path(self, name: str) -> Path:
        """Return where a service's output goes."""
        return self.folder / f"{name}.log"

    def said(self) -> str:
        """Return the ends of all logs."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{last_lines(path, 12)}" for path in paths)

    # ---- a container as a process ----------------------------------------------------------------

    def process(self, service: Service, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command in what is a service's container here."""
        command = [self.translated(word, service) for word in words]
        if command[0] == "python":
            command[0] = sys.executable
        temporary = self._sources(service)["/tmp"]
        temporary.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            return self._popen([*self.network.prefix(service), *command], service, temporary, out)

    def _popen(
        self, command: Sequence[str], service: Service, temporary: Path, out: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        folder = service.settings.get("working_dir")
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
        """Return a service's environment, and nothing of this process's but where programs are."""
        own = {key: self.translated(value, service) for key, value in service.environment.items()}
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
        proxy = {"no_proxy": "*", "NO_PROXY": "*"}
        image = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        marks = {MARK: self._mark, CONTAINER: service.name}
        return {**image, **marks, **proxy, **own}

    def translated(self, text: str, service: Service) -> str:
        """Return a word of a service as it is on this machine: addresses and paths."""
        text = self.network.translated(text, service)
        sources = self._sources(service)
        targets = "|".join(re.escape(one) for one in sorted(sources, key=len, reverse=True))
        pattern = rf"""(?<![\w/.-])({targets})(?=[/"\s]|$)"""
        return re.sub(pattern, lambda found: str(sources[found[1]]), text)

    def _sources(self, service: Service) -> dict[str, Path]:
        """Return where a container's paths are here."""
        mounts: dict[str, Path | None] = {"/tmp": None, **service.mounts}
        if service.name.startswith("supernode-"):  # the node config's paths are its executor's
            executor = self.services[service.name.replace("supernode", "clientapp")]
            mounts = {**executor.mounts, **mounts}
        temporary = self.folder / "tmpfs" / service.name
        return IMAGE | {
            target: source or temporary / target.strip("/") for target, source in mounts.items()
        }
