"""Entry point of the containers: checks the command line of a Flower program, then becomes it.

    python start.py flower-superlink --host=127.0.0.1 ...

Flower's Control API, which registers nodes and sends code to them, has no login. Only the address
that it listens on keeps others out, so that address is checked before anything listens. A ${NAME}
in a word is replaced by the environment variable.

fedhet/common/flower mends what Flower's programs lack: a SuperNode ends when one of its threads
dies, a SuperLink checks who calls and waits for its database, and an executor forks its apps from a
process that has imported torch.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from string import Template
from typing import NoReturn

from fedhet.common.flower import (
    database_locks,
    fork_executor,
    node_identity,
    programs,
    supernode_threads,
)

FLOWER = "1.39"
OPEN_CONTROL = "FEDHET_ALLOW_OPEN_CONTROL"
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec")


class Refused(ValueError):
    """The command must not run; the message is for the operator."""


def main(words: Sequence[str]) -> NoReturn:
    """Check a command and become it."""
    try:
        command = fill_in(words, os.environ)
        check(command, os.environ)
    except Refused as refusal:
        sys.exit(f"refused to start: {refusal}")
    mend(command[0])
    programs.become(command)


def mend(program: str) -> None:
    """Mend what Flower's programs lack in a deployment (fedhet/common/flower)."""
    if program == "flower-supernode":
        supernode_threads.install()
    elif program == "flower-superlink":
        node_identity.install()
        database_locks.install()
    else:
        fork_executor.install()


def fill_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the words with every ${NAME} replaced; none may be missing or empty."""
    known = {name: value for name, value in environment.items() if value}
    return [_fill_in(word, known) for word in words]


def _fill_in(word: str, known: Mapping[str, str]) -> str:
    try:
        return Template(word).substitute(known)
    except KeyError as missing:
        raise Refused(f"{missing.args[0]} is not set: set it in .env or the environment") from None
    except ValueError:
        raise Refused(f"{word!r} has a $ that starts no name: write $$ for a dollar sign") from None


def check(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the program, its Flower release, and what it would open to others."""
    if not command or command[0] not in PROGRAMS:
        raise Refused(f"{' '.join(command)!r} is unknown; allowed: {', '.join(PROGRAMS)}")
    check_release(importlib.metadata.version("flwr"))
    if command[0] == "flower-superlink":
        check_superlink(command[1:], environment)
    elif command[0] == "flower-supernode":
        check_supernode(command[1:])


def check_release(installed: str) -> None:
    """Refuse a release of Flower with ports that this file does not close (docs/moving-on.md)."""
    if installed.split(".")[:2] != FLOWER.split("."):
        raise Refused(
            f"flwr {installed} is installed, but these containers need {FLOWER}: other releases "
            f"serve Control and the sites on one port. Install flwr=={FLOWER}.0"
        )


def check_superlink(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a SuperLink whose Control others can reach, or that admits unknown nodes."""
    options = programs.superlink_options(arguments)
    if options.insecure:
        raise Refused("--insecure sends models and updates in the clear: give the --ssl-... files")
    if not options.enable_supernode_auth:
        raise Refused("anybody could join as a site: add --enable-supernode-auth")
    check_secret(options, "the executor's secret")
    if environment.get(OPEN_CONTROL) == "yes":
        return
    hosts = [options.host]
    if environment.get("FLWR_INTERNAL_GRPC_CONTROL_API") == "1":  # a second Control, by gRPC
        hosts.append(options.control_api_address.rpartition(":")[0].strip("[]"))
    for host in hosts:
        if not is_loopback(host):
            raise Refused(
                f"Control would listen on {host}, and it has no login: whoever reaches it can "
                "register nodes and run code at every site. Use a loopback address: "
                f"--host=127.0.0.1 (or, if you know who can reach it, {OPEN_CONTROL}=yes)"
            )


def check_supernode(arguments: Sequence[str]) -> None:
    """Refuse a SuperNode if others than its executor could take work from it."""
    options = programs.supernode_options(arguments)
    if not is_loopback(options.host):
        check_secret(options, f"with --host={options.host} the executor's secret")


def check_secret(options: object, what: str) -> None:
    """Refuse process isolation without a secret for the executor."""
    isolation, secret = (getattr(options, n) for n in ("isolation", "superexec_auth_secret_file"))
    if isolation == "process" and not secret:
        raise Refused(f"{what} is missing: add --superexec-auth-secret-file")


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback; False if it has none."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(host) and all(ipaddress.ip_address(one).is_loopback for one in found)


if __name__ == "__main__":
    main(sys.argv[1:])
