"""What the compose files of docker/ would start, read as Docker Compose reads them.

As far as those files go: anchors and merge keys, ${NAME}, ${NAME:-default} and $$, include, and
extends. tests/test_docker.py compares what comes out with Compose's own, where that is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[1] / "docker"
_PLAIN = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?::-(?P<default>[^${}]*))?\})")
_REPLACED = {"command", "entrypoint", "test"}  # by the later; other lists are put one after another


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
    depends_on: Mapping[str, str]  # by service, what is waited for
    settings: Mapping[str, Any]  # everything, as in the file


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


def image_entrypoint() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    return json.loads(line)


def services(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services of a compose file; the operator sets the variables."""
    model = _load(path, variables)
    return {
        name: _service(name, settings, model["secrets"], path.parent)
        for name, settings in model["services"].items()
    }


def _load(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    model = _filled_in(yaml.safe_load(path.read_text(encoding="utf-8")), variables)
    found: dict[str, Any] = {"services": {}, "secrets": {}}
    for other in model.get("include", []):
        found = _merged(found, _load(path.parent / other, variables))
    for name, settings in model["services"].items():
        assert name not in found["services"], f"{name} is in an included file, too"
        found["services"][name] = _extended(settings, model, path, variables)
    found["secrets"] |= model.get("secrets", {})
    return found


def _filled_in(value: Any, variables: Mapping[str, str]) -> Any:
    """Return plain values with every ${NAME} replaced; the innermost first, as they may nest."""
    if isinstance(value, dict):
        return {key: _filled_in(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled_in(inner, variables) for inner in value]
    if not isinstance(value, str):
        return value

    def replaced(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "\0"
        return variables.get(found["name"]) or found["default"] or ""

    while _PLAIN.search(value):
        value = _PLAIN.sub(replaced, value)
    return value.replace("\0", "$")


def _extended(
    settings: Mapping[str, Any], model: Mapping[str, Any], path: Path, variables: Mapping[str, str]
) -> dict[str, Any]:
    own = {key: value for key, value in settings.items() if key != "extends"}
    if "extends" not in settings:
        return own
    named = settings["extends"]
    if "file" in named:
        path = path.parent / named["file"]
        model = _filled_in(yaml.safe_load(path.read_text(encoding="utf-8")), variables)
    return _merged(_extended(model["services"][named["service"]], model, path, variables), own)


def _merged(first: Any, second: Any, key: str = "") -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        both = {
            name: _merged(first[name], second[name], name) for name in first.keys() & second.keys()
        }
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list) and key not in _REPLACED:
        return first + second
    return second


def _service(
    name: str, settings: Mapping[str, Any], secrets: Mapping[str, Any], folder: Path
) -> Service:
    mounts: dict[str, Path | None] = dict.fromkeys(settings.get("tmpfs", []))
    for volume in settings.get("volumes", []):
        if isinstance(volume, str):
            source, target = volume.split(":")
            volume = {"source": source, "target": target}
        mounts[volume["target"]] = folder / volume["source"]
    for secret in settings.get("secrets", []):
        if isinstance(secret, str):
            secret = {"source": secret, "target": secret}
        mounts[f"/run/secrets/{secret['target']}"] = folder / secrets[secret["source"]]["file"]
    mode = settings.get("network_mode", "")
    networks = settings.get("networks", {} if mode else ["default"])
    if isinstance(networks, list):
        networks = dict.fromkeys(networks)
    depends_on = settings.get("depends_on", {})
    return Service(
        name=name,
        words=(*settings.get("entrypoint", image_entrypoint()), *settings.get("command", [])),
        environment={key: str(value) for key, value in settings.get("environment", {}).items()},
        mounts=mounts,
        networks={key: tuple((own or {}).get("aliases", ())) for key, own in networks.items()},
        shares_network_of=mode.partition("service:")[2] or None,
        health=tuple(settings.get("healthcheck", {}).get("test", ())),
        depends_on={key: condition["condition"] for key, condition in depends_on.items()},
        settings=settings,
    )
