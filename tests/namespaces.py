"""docker/federation.yaml in network namespaces, and a stranger on the server's network.

What Docker would make of the file's networks: a namespace for each service that has one, a bridge
for each network, and in /etc/hosts of each namespace the names that Compose would give. Ports,
names and addresses are the file's. The stranger has the CA's certificate, which is no secret.

    python -m tests.namespaces        as root; prints what the stranger gets

Linux, root and `ip`. The machine's own network stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.compose import Service, names_seen_by
from tests.deployed import SITES, Deployment

STRANGER = "stranger"
APP = "/app/tests/stranger"
MARK = "stranger-was-here"
NOT_THERE = "Connection to the SuperLink is unavailable"
NAMES = Path("/etc/netns")  # where `ip netns exec` looks for a namespace's own /etc/hosts


def why_not() -> str | None:
    """Return why there can be no namespaces here, None if there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and the command ip"
    if os.geteuid() != 0:
        return "needs root"
    name = f"fedhet-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"ip netns add: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Namespaces:
    """The networks of a compose file, with a stranger on the default one."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        """Give out addresses.

        Args:
            services: of the compose file.
        """
        stranger = Service(STRANGER, (), {}, {"/tmp": None}, {"default": ()}, None, (), {}, {})
        self.services = {**services, STRANGER: stranger}
        self._prefix = f"fedhet-{os.getpid()}-"
        owners = [one for one in self.services.values() if one.shares_network_of is None]
        self._owners = [one.name for one in owners]
        self._networks = sorted({name for one in owners for name in one.networks})
        self._addresses = {
            (one.name, network): f"10.77.{self._networks.index(network)}.{number}"
            for number, one in enumerate(owners, 1)
            for network in one.networks
        }

    def open(self) -> None:
        """Make namespaces, bridges and names."""
        self._add(self._switch)
        for number in range(len(self._networks)):
            self._ip(self._switch, "link", "add", f"br{number}", "type", "bridge")
            self._ip(self._switch, "link", "set", f"br{number}", "up")
        for owner in self._owners:
            self._add(self._namespace(owner))
            self._ip(self._namespace(owner), "link", "set", "lo", "up")
            self._write_names(owner)
        for number, (owner, network) in enumerate(self._addresses):
            self._plug_in(owner, network, f"veth{number}")

    def close(self) -> None:
        """Remove all of it; what ran in it has ended."""
        for name in (self._switch, *map(self._namespace, self._owners)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(NAMES / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            NAMES.rmdir()  # if it is empty

    def prefix(self, service: Service) -> list[str]:
        """Return the words that start a command in a service's namespace."""
        owner = service.shares_network_of or service.name
        return ["ip", "netns", "exec", self._namespace(owner)]

    def translated(self, text: str, service: Service) -> str:
        """Return the word: here all is as in the file."""
        return text

    def server_names(self) -> list[str]:
        """Return the server's address."""
        return [self.address("network", "default")]

    def address(self, service: str, network: str) -> str:
        """Return a service's address on a network."""
        return self._addresses[service, network]

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    def _namespace(self, owner: str) -> str:
        return f"{self._prefix}{owner}"

    def _add(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)

    def _ip(self, namespace: str, *words: str) -> None:
        subprocess.run(["ip", "-n", namespace, *words], check=True, capture_output=True)

    def _plug_in(self, owner: str, network: str, port: str) -> None:
        number, namespace = self._networks.index(network), self._namespace(owner)
        peer = ["type", "veth", "peer", "name", f"eth{number}", "netns", namespace]
        self._ip(self._switch, "link", "add", port, *peer)
        self._ip(self._switch, "link", "set", port, "master", f"br{number}", "up")
        address = f"{self.address(owner, network)}/24"
        self._ip(namespace, "address", "add", address, "dev", f"eth{number}")
        self._ip(namespace, "link", "set", f"eth{number}", "up")

    def _write_names(self, owner: str) -> None:
        seen = names_seen_by(self.services[owner], self.services)
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self.address(other, net)} {name}" for name, (net, other) in seen.items()]
        folder = NAMES / self._namespace(owner)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")


# ---- the stranger --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What somebody tried, what came of it, and whether that is as it must be."""

    tried: str
    got: str
    right: bool


class Stranger:
    """Somebody on the server's network who has the CA's certificate and a clone."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        """Make a key of its own.

        Args:
            deployment: which it wants to get into; in namespaces.
            folder: of its own.
        """
        assert isinstance(deployment.network, Namespaces)
        self._deployment, self._network = deployment, deployment.network
        self._server = self._network.address("network", "default")
        self._folder = folder
        (folder / "flwr").mkdir(parents=True)
        self._service = replace(
            self._network.services[STRANGER],
            environment={"HOME": "/stranger", "FLWR_HOME": "/stranger/flwr"},
            mounts={"/stranger": folder},
        )
        shutil.copy(deployment.folder / "server" / "keys" / "ca.crt", folder)
        deployment.make_site(folder, STRANGER)

    def with_control_closed(self) -> list[Finding]:
        """Try everything; nothing must work."""
        ports = self._open_ports(self._server, 8000, *range(9090, 9100))
        found = [Finding("ports of the server", f"open: {ports}", ports == [9092])]
        near = self._network.address("supernode-0", "default")
        ports = self._open_ports(near, 8000, *range(9090, 9100))
        found += [Finding("ports of a site", f"open: {ports}", ports == [])]
        for port in (8000, 9092):
            for what, (code, said) in self._tries(port).items():
                refused = code != 0 and NOT_THERE in said
                found.append(Finding(f"{what} at port {port}", gist(code, said), refused))
        found += self._by_grpc()
        nodes = len(self._deployment.nodes())
        found.append(Finding("nodes of the federation", str(nodes), nodes == len(SITES)))
        found.append(Finding("sites that ran its code", str(self._marks()), self._marks() == 0))
        return found

    def with_control_open(self) -> list[Finding]:
        """Try the same after the SuperLink was restarted with Control on all addresses.

        Everything must work, or else that it did not before would say nothing.
        """
        open_control(self._deployment)
        ports = self._open_ports(self._server, 8000, *range(9090, 9100))
        found = [Finding("ports of the server", f"open: {ports}", ports == [8000, 9092])]
        for what, (code, said) in self._tries(8000).items():
            found.append(Finding(f"{what} at port 8000", gist(code, said), code == 0))
        nodes = len(self._deployment.nodes())
        found.append(Finding("nodes of the federation", str(nodes), nodes == len(SITES) + 1))
        everywhere = self._marks() == len(SITES)
        found.append(Finding("sites that ran its code", str(self._marks()), everywhere))
        return found

    def _tries(self, port: int) -> dict[str, tuple[int, str]]:
        """Return exit code and output of listing nodes, registering one, running code at them."""
        (self._folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "there"\n\n[superlink.there]\n'
            f'address = "{self._server}:{port}"\nroot-certificates = "{self._folder}/ca.crt"\n'
        )
        public_key = f"/stranger/site/keys/{STRANGER}.pub"
        return {
            "list": self._run("flwr", "supernode", "list", "there"),
            "register": self._run("flwr", "supernode", "register", public_key, "there"),
            "run": self._run("flwr", "run", APP, "there", "--stream"),
        }

    def _by_grpc(self) -> list[Finding]:
        answer = self._probe("grpc", f"{self._server}:9092", "/stranger/ca.crt")
        found = []
        for service, wanted in (("Control", "UNIMPLEMENTED"), ("Fleet", "UNAUTHENTICATED")):
            codes = [code for name, code in answer.items() if name.startswith(f"{service}/")]
            got = f"{len(codes)} methods: {', '.join(sorted(set(codes)))}"
            found.append(Finding(f"{service} by gRPC", got, set(codes) == {wanted}))
        return found

    def _open_ports(self, host: str, *ports: int) -> list[int]:
        return self._probe("ports", host, *map(str, ports))

    def _probe(self, *words: str):
        code, said = self._run("python", f"{APP}/probe.py", *words)
        assert code == 0, said
        return json.loads(said.splitlines()[-1])

    def _run(self, *words: str) -> tuple[int, str]:
        done = self._deployment.execute_as(self._service, *words)
        return done.returncode, done.stdout

    def _marks(self) -> int:
        return len(list(self._deployment.folder.glob(f"site-*/state/clients/{MARK}")))


def gist(code: int, said: str) -> str:
    """Return a command's exit code and what it said last, or that it found no SuperLink."""
    lines = [line.strip(" │╭╮╰╯─└┘┴") for line in said.splitlines()]
    last = NOT_THERE if NOT_THERE in said else [line for line in lines if line][-1]
    return f"exit code {code}, {last}"


def open_control(deployment: Deployment) -> None:
    """Restart the SuperLink with Control on all addresses, which takes saying so."""
    deployment.stop("superlink")
    deployment.edit(
        "superlink", {"--host=127.0.0.1": "--host=0.0.0.0"}, {"FEDHET_ALLOW_OPEN_CONTROL": "yes"}
    )
    deployment.start_and_wait("superlink")
    deployment.wait_until_healthy(*(f"supernode-{site}" for site in SITES))


def main() -> int:
    """Print what a stranger gets, with Control closed and then open; 0 if it is as it must be."""
    problem = why_not()
    if problem:
        sys.exit(f"no network namespaces here: {problem}")
    found: list[Finding] = []
    with (
        tempfile.TemporaryDirectory(prefix="fedhet-") as folder,
        Deployment(Path(folder, "federation"), Namespaces) as deployment,
    ):
        stranger = Stranger(deployment, Path(folder, STRANGER))
        for state, tried in (
            ("on 127.0.0.1", stranger.with_control_closed),
            ("on 0.0.0.0", stranger.with_control_open),
        ):
            print(f"\nControl {state}")
            for one in tried():
                print(f"  {'' if one.right else 'WRONG: '}{one.tried}: {one.got}")
                found.append(one)
    return 0 if all(one.right for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
