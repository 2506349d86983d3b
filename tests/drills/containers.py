"""docker/federation.yaml in a real Docker Engine, with the commands of tests/deployed.py.

So a drill runs in containers as it does in processes. Every federation is a Compose project of its
own, in a folder of its own, with a port of its own on the host's loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedhet.common.flower.line import installed_release
from tests.compose import Service
from tests.deployed import ACTIVATED, ROOT, SITES, Deployment
from tests.processes import SECONDS

# Where torch's index of CPU builds can be reached, FEDHET_TARGET=cpu is smaller.
TARGET = os.environ.get("FEDHET_TARGET", "cpu-pypi")
IMAGE = os.environ.get("FEDHET_IMAGE", "fedhet:test")
USER = 1000


def why_no_engine() -> str | None:
    """Return why there can be no containers here, None if there can."""
    if shutil.which("docker") is None:
        return "there is no command docker"
    for words in (["version", "--format", "{{.Server.Version}}"], ["compose", "version"]):
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"docker {words[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    return None


PROBLEM = why_no_engine()
MARKS = [
    pytest.mark.docker,
    pytest.mark.timeout(SECONDS + 600),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no Docker Engine: {PROBLEM}"),
]


def docker(*words: str, **options: Any) -> str:
    """Run a command of Docker's; return its output."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def build(tag: str = IMAGE, root: Path = ROOT) -> None:
    """Build the image of a clone, with the release of Flower that is installed here."""
    words = ["build", "-q", "-f", "docker/Dockerfile", "--target", TARGET, "-t", tag]
    docker(*words, "--build-arg", f"FLWR={installed_release()}", ".", cwd=root)


@cache
def image_of_this_clone() -> str:
    """Build the image, unless FEDHET_IMAGE names one; return its name."""
    if not os.environ.get("FEDHET_IMAGE"):
        build()
    return IMAGE


def build_changed(folder: Path) -> float:
    """Build the image IMAGE-changed of a copy with other code; return the seconds."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    with (folder / "common" / "errors.py").open("a") as file:
        file.write(f"\n# {time.time()}\n")
    began = time.monotonic()
    build(f"{IMAGE}-changed", folder)
    return time.monotonic() - began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def inspect(container: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container))
    assert isinstance(found, dict)
    return found


def own(folder: Path) -> str:
    """Let the containers write into a folder; return their user, who is never root."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        return f"{os.getuid()}:{os.getgid()}"
    os.chown(folder, USER, USER)
    return f"{USER}:{USER}"


class Containers(Deployment):
    """A running federation; a context manager that leaves no container and no network behind."""

    def __init__(self, folder: Path, **variables: str) -> None:
        super().__init__(folder)
        self.project = f"fedhet-{uuid.uuid4().hex[:8]}"
        self.also: list[Path] = []  # further compose files
        self.variables = {
            "FEDHET_DIR": str(folder),
            "FEDHET_USER": own(folder),
            "FEDHET_IMAGE": IMAGE,
            "FEDHET_TARGET": TARGET,
            "FLEET_ADDRESS": "127.0.0.1",
            "FLEET_PORT": str(free_port()),
            **variables,
        }

    def __enter__(self) -> Containers:
        """Make the keys, start all services, and wait until they are healthy."""
        try:
            self.make_keys()
            self.compose("up", "-d")
            running = (one.name for one in self.services.values() if one.health)
            self.wait_until_healthy(*running)  # on a busy machine Compose's --wait gives up
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self.compose("down")

    def left(self) -> list[Any]:
        """Return what is left of this project: containers, networks and volumes."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (["ps", "-a"], ["network", "ls"], ["volume", "ls"])
        return [one for kind in kinds for one in docker(*kind, "-q", "-f", label).split()]

    def all_processes(self) -> list[psutil.Process]:
        label = f"label=com.docker.compose.project={self.project}"
        running = docker("ps", "-q", "-f", label).split()
        if not running:
            return []
        first = docker("inspect", "-f", "{{.State.Pid}}", *running).split()
        found = []
        for one in map(int, first):
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(one).children(recursive=True)
        return found

    # ---- the operator's commands -----------------------------------------------------------------

    def command(self, *words: str) -> list[str]:
        files = [ROOT / "docker" / "federation.yaml", *self.also]
        chosen = [word for file in files for word in ("-f", str(file))]
        return ["docker", "compose", "-p", self.project, *chosen, *words]

    def compose(self, *words: str, seconds: float = SECONDS) -> str:
        done = self._compose(*words, seconds=seconds)
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def _compose(self, *words: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env={**os.environ, **self.variables},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )

    def container(self, name: str) -> str:
        """Return a service's container."""
        return self.compose("ps", "-a", "-q", name).strip()

    def inspected(self, name: str) -> dict[str, Any]:
        return inspect(self.container(name))

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.inspected(name)["State"]
        return found

    def make_keys(self) -> None:
        self.checked("keys", "federation", str(len(SITES)))

    def start(self, *names: str) -> None:
        self.compose("start", *names)

    def recreate(self, *names: str) -> None:
        """Make containers anew, with their files as they are now."""
        self.compose("up", "-d", "--no-deps", "--force-recreate", *names)

    def stop(self, name: str) -> int:
        self.compose("stop", name)
        return int(self.state(name)["ExitCode"])

    def restart(self, *names: str) -> None:
        self.compose("restart", *names)

    def kill(self, *names: str) -> None:
        self.compose("kill", *names)

    def crash(self, *names: str) -> None:
        """Kill all processes in containers from inside, of which Docker is told nothing."""
        for name in names:
            self.execute(name, "sh", "-c", "kill -9 -1")

    def pause(self, *names: str) -> None:
        self.compose("pause", *names)

    def unpause(self, *names: str) -> None:
        self.compose("unpause", *names)

    def restart_supernode(self, name: str) -> tuple[float, int]:
        """Start a SuperNode until Docker's restarts get it in; return seconds and tries."""
        container, began = self.container(name), time.monotonic()
        before = inspect(container)["RestartCount"]
        since = str(time.time())
        self.start(name)
        self.wait(lambda: ACTIVATED in self.log(name, "--since", since), name)
        tries = inspect(container)["RestartCount"] - before + 1
        return time.monotonic() - began, tries

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self._compose("run", "--rm", "-T", name, *words)

    def execute(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self._compose("exec", "-T", name, *words)

    def execute_as(self, service: Service, *words: str) -> subprocess.CompletedProcess[str]:
        raise NotImplementedError("a container of no service")

    # ---- health and logs -------------------------------------------------------------------------

    def health(self, name: str) -> str:
        """Return starting, healthy or unhealthy."""
        return str(self.state(name)["Health"]["Status"])

    def is_healthy(self, name: str) -> bool:
        state = self.state(name)
        return bool(state["Running"]) and state["Health"]["Status"] == "healthy"

    def wait_until_healthy(self, *names: str, seconds: float = SECONDS) -> None:
        for name in names:
            self.wait(lambda name=name: self.is_healthy(name), f"{name} healthy", seconds)

    def wait(self, done: Callable[[], bool], what: str, seconds: float = SECONDS) -> float:
        """Wait for something; return the seconds."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < seconds, f"{what}: not yet\n{self.said()}"
            time.sleep(0.5)
        return time.monotonic() - began

    def log(self, name: str, *words: str) -> str:
        done = subprocess.run(
            ["docker", "logs", *words, self.container(name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return done.stdout

    def said(self) -> str:
        return self._compose("ps", "-a").stdout + self._compose("logs", "--tail", "12").stdout

    def translated(self, text: str, service: Service) -> str:
        """Return a word of a service: in a container all are as the file has them."""
        return text
