"""The address of a SuperLink's Control API, and a check that it can be reached."""

from __future__ import annotations

import http.client
import json
import os
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
    """Address and certificate of a Control API."""

    address: str  # host:port
    root_certificates: str = ""  # the CA's certificate; "" for those of the system
    insecure: bool = False  # without TLS
    federation: str = ""  # Flower's id of one; "" for the SuperLink's default

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])


def connection_of(runtime: DictConfig) -> Connection:
    """Return the connection that the recipe's runtime names; LaunchError if it is invalid."""
    ca = runtime.root_certificates
    found = (
        _from_flower_config(str(runtime.connection))
        if runtime.connection
        else Connection(
            str(runtime.address),
            str(Path(str(ca)).expanduser().absolute()) if ca else "",
            bool(runtime.insecure),
        )
    )
    if not (found.host and found.address.rpartition(":")[2].isdigit()):
        raise LaunchError(f"runtime.address={found.address} must be host:port of a SuperLink")
    if found.insecure and found.root_certificates:
        raise LaunchError(
            f"runtime.insecure=true excludes runtime.root_certificates={found.root_certificates}: "
            "set one of them"
        )
    if found.root_certificates and not Path(found.root_certificates).is_file():
        raise LaunchError(
            f"runtime.root_certificates={found.root_certificates} is not a file: name the "
            "certificate of the CA that signed the server's certificate"
        )
    return found


def _from_flower_config(name: str) -> Connection:
    path = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser() / "config.toml"
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
    found = tables[name]
    return Connection(
        str(found.get("address", "")),
        str(found.get("root-certificates", "")),
        bool(found.get("insecure", False)),
        str(found.get("federation", "")),
    )


def check_reachable(connection: Connection) -> None:
    """Ask a Control API for its release of Flower; raise LaunchError if it is not usable."""
    where = f"runtime.address={connection.address}"
    with_tls = not connection.insecure
    client = http.client.HTTPConnection(connection.host, connection.port, timeout=_SECONDS)
    if with_tls:
        context = ssl.create_default_context(cafile=connection.root_certificates or None)
        client = http.client.HTTPSConnection(
            connection.host, connection.port, timeout=_SECONDS, context=context
        )
    try:
        client.connect()
    except ssl.SSLCertVerificationError as error:
        raise LaunchError(
            f"the certificate of {where} is refused ({error.verify_message}): "
            f"runtime.root_certificates={connection.root_certificates or 'null'} must be the CA "
            "that signed it, and the address one of its names"
        ) from error
    except (ssl.SSLError, ConnectionResetError) as error:
        raise LaunchError(
            f"{where} does not speak TLS ({error}): set runtime.insecure=true if that is intended"
        ) from error
    except OSError as error:
        raise LaunchError(
            f"no SuperLink answers at {where} ({error.strerror or error}); Control listens on the "
            "server's loopback: start fedhet there, or open a tunnel"
        ) from error
    try:
        client.request("GET", "/openapi.json")
        about = json.loads(client.getresponse().read())["info"]
        title, release = about["title"], str(about["version"])
    except (OSError, http.client.HTTPException) as error:
        why = "it does not speak HTTP/1" if with_tls else "TLS is off (runtime.insecure=true)"
        raise LaunchError(
            f"{where} is not a SuperLink's Control: {why}, and it closes the connection "
            f"({type(error).__name__}); Control's port is --port, 8000 by default, not the Fleet's"
        ) from error
    except (ValueError, KeyError, TypeError):
        title, release = "", ""
    finally:
        client.close()
    if title != _TITLE:
        raise LaunchError(f"{where} is not a SuperLink's Control: something else answers")
    if release.split(".")[:2] != FLOWER.split("."):
        raise LaunchError(
            f"the SuperLink at {where} runs flwr {release}, but this launcher needs {FLOWER}: all "
            "parties must run the same line"
        )
