"""Issue: Flower's releases reach a SuperLink in two ways, and only one of them keeps Control apart.

- gRPC line, 1.39: the sites call Fleet on a port of its own. Control listens on loopback.
- HTTP line, 1.40 and later: one port serves Fleet and Control. It listens on loopback, and the
  sites come through a gate (gate.py).

Everything that differs is in the two classes; the installed release chooses one.
Uses: the release in Flower's metadata, the words and variables of its programs.
Releases: 1.39 and later. Not needed when 1.39 is no longer supported:
`tests/test_flower_line.py::test_both_lines_are_supported`.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from fedhet.common.errors import ConfigError
from fedhet.common.flower import node_identity

# Flower's switch for a second Control, by gRPC, whose address --control-api-address has.
_GRPC_CONTROL = "FLWR_INTERNAL_GRPC_CONTROL_API"


class Line(ABC):
    """Releases of Flower that understand each other."""

    name: ClassVar[str]
    tried: ClassVar[tuple[str, ...]]  # releases that the project's tests have run with
    has_gate: ClassVar[bool]  # whether a gate must stand between the sites and the SuperLink

    @abstractmethod
    def superlink_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a `flower-superlink` command that this line understands."""

    @abstractmethod
    def check_callers(self) -> None:
        """Let this process's SuperLink refuse calls of a node in the name of another."""

    def control_hosts(self, options: Any, environment: Mapping[str, str]) -> list[str]:
        """Return the hosts where a SuperLink with these options serves Control."""
        hosts = [str(options.host)]
        if environment.get(_GRPC_CONTROL) == "1":
            hosts.append(str(options.control_api_address).rpartition(":")[0].strip("[]"))
        return hosts


class GrpcLine(Line):
    """1.39, the last release whose SuperNodes speak gRPC."""

    name, tried, has_gate = "gRPC", ("1.39",), False

    def superlink_words(self, words: Sequence[str]) -> list[str]:
        """Return all words: the sites have a port of their own, which serves nothing else."""
        return list(words)

    def check_callers(self) -> None:
        """Complete the interceptor of the gRPC Fleet API."""
        node_identity.mend_grpc()


class HttpLine(Line):
    """1.40 and later: a SuperLink has one port, for sites and for whoever submits runs."""

    name, tried, has_gate = "HTTP", ("1.42",), True

    def superlink_words(self, words: Sequence[str]) -> list[str]:
        """Return the words without the port of the sites, which is the gate's."""
        return [word for word in words if not word.startswith("--fleet-api-")]

    def check_callers(self) -> None:
        """Complete the middleware of the HTTP Fleet API."""
        node_identity.mend_http()


LINES: tuple[Line, ...] = (GrpcLine(), HttpLine())
OLDEST, NEWEST = (LINES[0].tried[0], LINES[-1].tried[-1])


def line_of(release: str) -> Line:
    """Return the line of a release, such as 1.39.0; a newer one than any belongs to the last.

    Raises:
        ConfigError: the release is older than all lines.
    """
    number = _number(release)
    if number < _number(OLDEST):
        raise ConfigError(f"flwr {release} is installed, but fedhet needs {OLDEST} or newer")
    return LINES[0] if number == _number(OLDEST) else LINES[1]


@cache
def installed_line() -> Line:
    """Return the line of the installed Flower."""
    return line_of(installed_release())


def installed_release() -> str:
    """Return the release of the installed Flower."""
    return importlib.metadata.version("flwr")


def untried(release: str) -> str | None:
    """Say that a release is newer than those that fedhet was tried with; None if it is not."""
    if _number(release) <= _number(NEWEST):
        return None
    return f"flwr {release} is newer than fedhet was tried with ({OLDEST} to {NEWEST})"


def same_line(one: str, other: str) -> bool:
    """Return whether two releases understand each other; no release older than OLDEST does."""
    try:
        return line_of(one) is line_of(other)
    except (ConfigError, ValueError):  # ValueError: not a release
        return False


def _number(release: str) -> tuple[int, int]:
    """Return major and minor number; a development release counts as its release."""
    major, minor = release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)
