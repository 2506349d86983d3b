"""docker/federation.yaml in network namespaces, and a stranger on the server's network.

As in Docker, each service with a network of its own has a namespace, each network a bridge, and
/etc/hosts of each namespace the names that Compose would give. Ports, names and addresses are those
of the file. Needs Linux, root and `ip`; the machine's own network is unchanged.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.compose import DOCKER, Service, names_seen_by
from tests.deployed import Loopback

STRANGER = "stranger"
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
        stranger = Service(STRANGER, (), {}, {"/tmp": None}, {"default": ()}, None, (), {})
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


def make_keys(folder: Path, *words: str) -> None:
    command = [sys.executable, str(DOCKER / "keys.py"), *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
