"""Where a SuperLink's Control is, and whether it can be reached."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedhet.runtimes.flower_install import FLOWER, LaunchError

_SECONDS = 30.0
_TITLE = "SuperLink API"


@dataclass(frozen=True)
class Connection:
    """A way to Control.

    Attributes:
        address: host:port.
        root_certificates: the CA's certificate; "" for those of the system.
        insecure: without TLS.
        federation: Flower's id of one, "" for the SuperLink's own.
    """

    address: str
    root_certificates: str = ""
    insecure: bool = False
    federation: str = ""

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The address' port."""
        return int(self.address.rpartition(":")[2])


def connection_of(runtime: DictConfig) -> Connection:
    """Return the connection that the recipe's runtime names.

    Raises:
        LaunchError: for a name, an address or a file that is none.
    """
    found = (
        _named(str(runtime.connection))
        if runtime.connection
        else Connection(
            str(runtime.address),
            _absolute(runtime.root_certificates),
            bool(runtime.insecure),
        )
    )
    if not (found.host and found.address.rpartition(":")[2].isdigit()):
        raise LaunchError(
            f"runtime.address={found.address} is no address of a SuperLink: give host:port"
        )
    if found.insecure and found.root_certificates:
        raise LaunchError(
            f"runtime.insecure=true, and runtime.root_certificates={found.root_certificates} is "
            "for TLS: set one of them"
        )
    if found.root_certificates and not Path(found.root_certificates).is_file():
        raise LaunchError(
            f"runtime.root_certificates={found.root_certificates} is no file: give the certificate "
            "of the CA that has signed the server's"
        )
    return found


def _named(name: str) -> Connection:
    home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser()
    path = home / "config.toml"
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise LaunchError(
            f"runtime.connection={name}, but {path} names no SuperLink ({error}): set "
            "runtime.address and runtime.root_certificates instead"
        ) from error
    names = sorted(key for key, value in tables.items() if isinstance(value, dict))
    if name not in names:
        raise LaunchError(
            f"runtime.connection={name} is not in {path}; allowed: {', '.join(names)}"
        )
    own = tables[name]
    return Connection(
        str(own.get("address", "")),
        str(own.get("root-certificates", "")),
        bool(own.get("insecure", False)),
        str(own.get("federation", "")),
    )


def _absolute(path: object) -> str:
    return str(Path(str(path)).expanduser().absolute()) if path else ""


def check_reachable(connection: Connection) -> None:
    """Ask Control whether it is there.

    Raises:
        LaunchError: if nobody listens, the certificate is another CA's or another host's, what
            listens is no Control, or one of another line of Flower.
    """
    address = connection.address
    try:
        plain = socket.create_connection((connection.host, connection.port), timeout=_SECONDS)
    except OSError as error:
        raise LaunchError(
            f"no SuperLink answers at runtime.address={address} ({error.strerror or error}); it "
            "listens on the server's own loopback: start fedhet there, or make a tunnel"
        ) from error
    with plain:
        channel = plain if connection.insecure else _secured(connection, plain)
        with channel:
            release = _ask_release(connection, channel)
    if not release:
        raise LaunchError(
            f"runtime.address={address} is no Control of a SuperLink: something else answers"
        )
    if release.split(".")[:2] != FLOWER.split("."):
        raise LaunchError(
            f"the SuperLink at runtime.address={address} is of flwr {release}, and this launcher "
            f"is written for {FLOWER}: all parties have to run the same line"
        )


def _secured(connection: Connection, plain: socket.socket) -> socket.socket:
    where = f"runtime.address={connection.address}"
    context = ssl.create_default_context(cafile=connection.root_certificates or None)
    try:
        return context.wrap_socket(plain, server_hostname=connection.host)
    except ssl.SSLCertVerificationError as error:
        raise LaunchError(
            f"the certificate of {where} is refused ({error.verify_message}): "
            f"runtime.root_certificates={connection.root_certificates or 'null'} has to be the CA "
            "that signed it, and the address one of its names"
        ) from error
    except OSError as error:
        raise LaunchError(
            f"{where} does not speak TLS ({error}): set runtime.insecure=true if it is meant not to"
        ) from error


def _ask_release(connection: Connection, channel: socket.socket) -> str:
    """Return the release of Flower that Control's description of itself names."""
    client = http.client.HTTPConnection(connection.host)
    client.sock = channel
    try:
        client.request("GET", "/openapi.json")
        about = json.loads(client.getresponse().read())["info"]
        return str(about["version"]) if about["title"] == _TITLE else ""
    except (OSError, http.client.HTTPException) as error:
        speaks = "TLS is off (runtime.insecure=true)" if connection.insecure else "it is not HTTP/1"
        raise LaunchError(
            f"runtime.address={connection.address} is no Control of a SuperLink: {speaks}, and it "
            f"hangs up ({type(error).__name__}); Control's port is --port, 8000 by default, not "
            "the Fleet's"
        ) from error
    except (ValueError, KeyError, TypeError):
        return ""
