"""docker/federation.yaml in network namespaces, and a stranger on the server's network.

As in Docker, each service with a network of its own has a namespace, each network a bridge, and
/etc/hosts of each namespace the names that Compose would give. Ports, names and addresses are those
of the file. Needs Linux, root and `ip`; the machine's own network is unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.compose import DOCKER, Service, names_seen_by
from tests.deployed import SITES, Deployment, Loopback
from tests.stranger.theirs import MARK

STRANGER = "stranger"
APP = "/app/tests/stranger"
UNAVAILABLE = "Connection to the SuperLink is unavailable"
NAMES = Path("/etc/netns")  # `ip netns exec` takes a namespace's /etc/hosts from here


def why_not() -> str | None:
    """Return why there can be no namespaces here, None if there can."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        return "needs Linux, root and the command ip"
    name = f"fedhet-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"ip netns add: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Namespaces(Loopback):
    """The networks of a compose file, with a stranger on the default one."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        stranger = Service(STRANGER, (), {}, {"/tmp": None}, {"default": ()}, None, (), {}, {})
        self.services = {**services, STRANGER: stranger}
        self._prefix = f"fedhet-{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self._owners = [one for one in self.services.values() if one.shares_network_of is None]
        self._networks = sorted({name for one in self._owners for name in one.networks})
        self._places = {
            (one.name, network): f"10.77.{self._networks.index(network)}.{number}"
            for number, one in enumerate(self._owners, 1)
            for network in one.networks
        }

    def open(self) -> None:
        _ip("netns", "add", self._switch)
        for number in range(len(self._networks)):
            self._in(self._switch, "link", "add", f"br{number}", "type", "bridge")
            self._in(self._switch, "link", "set", f"br{number}", "up")
        for owner in self._owners:
            namespace = f"{self._prefix}{owner.name}"
            _ip("netns", "add", namespace)
            self._in(namespace, "link", "set", "lo", "up")
            seen = names_seen_by(owner, self.services)
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            lines += [f"{self.address(other, net)} {name}" for name, (net, other) in seen.items()]
            (NAMES / namespace).mkdir(parents=True, exist_ok=True)
            (NAMES / namespace / "hosts").write_text("\n".join(lines) + "\n")
        for number, (owner, network) in enumerate(self._places):
            self._plug_in(f"{self._prefix}{owner}", network, self._places[owner, network], number)

    def close(self) -> None:
        for name in (self._switch, *(f"{self._prefix}{owner.name}" for owner in self._owners)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(NAMES / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            NAMES.rmdir()  # if it is empty

    def address(self, service: str, network: str = "default") -> str:
        return self._places[service, network]

    def prefix(self, service: Service) -> list[str]:
        owner = service.shares_network_of or service.name
        return ["ip", "netns", "exec", f"{self._prefix}{owner}"]

    def translated(self, text: str, service: Service) -> str:
        return text

    def _in(self, namespace: str, *words: str) -> None:
        _ip("-n", namespace, *words)

    def _plug_in(self, namespace: str, network: str, address: str, port: int) -> None:
        number = self._networks.index(network)
        peer = ["type", "veth", "peer", "name", f"eth{number}", "netns", namespace]
        self._in(self._switch, "link", "add", f"veth{port}", *peer)
        self._in(self._switch, "link", "set", f"veth{port}", "master", f"br{number}", "up")
        self._in(namespace, "address", "add", f"{address}/24", "dev", f"eth{number}")
        self._in(namespace, "link", "set", f"eth{number}", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Stranger:
    """A process on the server's network that has the CA's certificate and a clone."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        assert isinstance(deployment.network, Namespaces)
        self._deployment, self._folder = deployment, folder
        self.server = deployment.network.address("network")
        (folder / "flwr").mkdir(parents=True)
        self._service = replace(
            deployment.network.services[STRANGER],
            environment={"HOME": "/stranger", "FLWR_HOME": "/stranger/flwr"},
            mounts={"/stranger": folder},
        )
        shutil.copy(deployment.folder / "server" / "keys" / "ca.crt", folder)
        make_keys(folder, "site", STRANGER)

    def uses_control(self, port: int) -> dict[str, str]:
        """Try to list the nodes, register one, and run code at them; return what came of each."""
        (self._folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "there"\n\n[superlink.there]\n'
            f'address = "{self.server}:{port}"\nroot-certificates = "{self._folder}/ca.crt"\n'
        )
        public_key = f"/stranger/site/keys/{STRANGER}.pub"
        tries = {
            "list": ["supernode", "list", "there"],
            "register": ["supernode", "register", public_key, "there"],
            "run": ["run", APP, "there", "--stream"],
        }
        found = {}
        for name, words in tries.items():
            code, said = self._run("flwr", *words)
            found[name] = "unavailable" if code and UNAVAILABLE in said else f"exit code {code}"
        return found

    def status_by_method(self) -> dict[str, str]:
        """Return the gRPC status of every method of Control and Fleet at the sites' port."""
        return self._probe("grpc", f"{self.server}:9092", "/stranger/ca.crt")

    def open_ports(self, host: str) -> list[int]:
        return self._probe("ports", host, "8000", *map(str, range(9090, 9100)))

    def marks(self) -> int:
        """Return the number of sites that ran the stranger's code."""
        return len(list(self._deployment.folder.glob(f"site-*/state/clients/{MARK}")))

    def _probe(self, *words: str):
        code, said = self._run("python", f"{APP}/probe.py", *words)
        assert code == 0, said
        return json.loads(said.splitlines()[-1])

    def _run(self, *words: str) -> tuple[int, str]:
        done = self._deployment.execute_as(self._service, *words)
        return done.returncode, done.stdout


def make_keys(folder: Path, *words: str) -> None:
    command = [sys.executable, str(DOCKER / "keys.py"), *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def open_control(deployment: Deployment) -> None:
    """Restart the SuperLink with Control on all addresses, as an operator who insists on it."""
    deployment.stop("superlink")
    service = deployment.services["superlink"]
    opened = {"--host=127.0.0.1": "--host=0.0.0.0"}
    assert set(opened) <= set(service.words)
    deployment.services["superlink"] = replace(
        service,
        words=tuple(opened.get(word, word) for word in service.words),
        environment={**service.environment, "FEDHET_ALLOW_OPEN_CONTROL": "yes"},
    )
    deployment.start_and_wait("superlink")
    deployment.wait_until_healthy(*(f"supernode-{site}" for site in SITES))
