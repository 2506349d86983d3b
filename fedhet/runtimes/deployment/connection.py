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

from fedhet.common.flower.line import installed_release, same_line
from fedhet.common.kinds import is_address
from fedhet.runtimes.flower_install import LaunchError

_SECONDS = 30.0
_TITLE = "SuperLink API"
_WHICH_FILE = "name the certificate (PEM) of the CA that signed the server's certificate"
_INSTEAD = "set runtime.address and runtime.root_certificates instead"


@dataclass(frozen=True)
class Connection:
    """Address and certificate of a Control API."""

    address: str  # host:port
    root_certificates: str = ""  # the CA's certificate; "" for the system's
    insecure: bool = False  # without TLS
    federation: str = ""  # Flower's id; "" for the SuperLink's default

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
            os.path.abspath(os.path.expanduser(str(ca))) if ca else "",
            bool(runtime.insecure),
        )
    )
    if found.insecure and found.root_certificates:
        raise LaunchError(
            f"runtime.insecure=true excludes runtime.root_certificates={found.root_certificates}: "
            "set one of them"
        )
    if found.root_certificates and not Path(found.root_certificates).is_file():
        raise LaunchError(
            f"runtime.root_certificates={found.root_certificates} is not a file: {_WHICH_FILE}"
        )
    return found


def _from_flower_config(name: str) -> Connection:
    path = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser() / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink")
    except (OSError, ValueError) as error:  # ValueError: not text, or not TOML
        raise LaunchError(
            f"runtime.connection={name}, but {path} cannot be read ({error}): {_INSTEAD}"
        ) from error
    named = tables if isinstance(tables, dict) else {}
    names = sorted(key for key, value in named.items() if isinstance(value, dict))
    if name not in names:
        raise LaunchError(
            f"runtime.connection={name} is not in {path}; "
            + (f"allowed: {', '.join(names)}" if names else f"it names no SuperLink: {_INSTEAD}")
        )
    found: dict[str, Any] = named[name]
    address, ca = str(found.get("address", "")), str(found.get("root-certificates", ""))
    insecure = found.get("insecure", False)
    for key, value, is_valid, allowed in (
        ("address", address, is_address(address), "host:port, without https://"),
        ("root-certificates", ca, not ca or Path(ca).is_absolute(), "an absolute path"),
        ("insecure", insecure, isinstance(insecure, bool), "true or false"),
    ):
        if not is_valid:
            raise LaunchError(
                f"runtime.connection={name}: {key}={value} in {path} is not allowed: it must be "
                f"{allowed}"
            )
    return Connection(address, ca, insecure, str(found.get("federation", "")))


def check_reachable(connection: Connection) -> None:
    """Ask a Control API for its release of Flower; raise LaunchError if it is not usable."""
    where = f"runtime.address={connection.address}"
    with_tls = not connection.insecure
    client = http.client.HTTPConnection(connection.host, connection.port, timeout=_SECONDS)
    if with_tls:
        context = _tls_context(connection.root_certificates)
        client = http.client.HTTPSConnection(
            connection.host, connection.port, timeout=_SECONDS, context=context
        )
    try:
        client.connect()
    except ssl.SSLCertVerificationError as error:
        raise LaunchError(
            f"the certificate of {where} is rejected ({error.verify_message}): "
            f"runtime.root_certificates={connection.root_certificates or 'null'} must be the CA "
            "that signed it, and the certificate must name the address"
        ) from error
    except (ssl.SSLError, ConnectionResetError) as error:
        raise LaunchError(
            f"{where} does not speak TLS ({error}): set runtime.insecure=true if that is intended"
        ) from error
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"no SuperLink answers at {where} ({why}). Control listens on the server's loopback: "
            "start fedhet on the server, or open a tunnel to it"
        ) from error
    try:
        client.request("GET", "/openapi.json")
        about = json.loads(client.getresponse().read())["info"]
        title, release = about["title"], str(about["version"])
    except (OSError, http.client.HTTPException) as error:
        why = "it does not speak HTTP/1" if with_tls else "TLS is off (runtime.insecure=true)"
        raise LaunchError(
            f"{where} is not a SuperLink's Control: {why}, and it closes the connection "
            f"({type(error).__name__}). Control's port is --port, 8000 by default, not the Fleet's"
        ) from error
    except (ValueError, KeyError, TypeError):
        title, release = "", ""
    finally:
        client.close()
    if title != _TITLE:
        raise LaunchError(f"{where} is not a SuperLink's Control: another program answers")
    here = installed_release()
    if not same_line(release, here):
        raise LaunchError(
            f"the SuperLink at {where} runs flwr {release}, but {here} is installed here: install "
            f"flwr=={release}, because releases of different lines do not understand each other"
        )


def _tls_context(root_certificates: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=root_certificates or None)
    except OSError as error:  # the file cannot be opened, or has no certificate
        raise LaunchError(
            f"runtime.root_certificates={root_certificates} cannot be read "
            f"({error.strerror or error}): {_WHICH_FILE}"
        ) from error
