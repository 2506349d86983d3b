"""The containers' entry point: checks a Flower program's command line, then becomes the program.

    python start.py flower-superlink --host=127.0.0.1 ...

Control, by which nodes are registered and code is sent to them, asks nobody who they are. That it
listens where only the operator is, is all that keeps others out, and so is checked here, before
anything listens. A ${NAME} in a word is filled in from the environment.

A SuperNode ends when one of its threads dies, and Docker starts it again. Flower 1.39's goes on
without its heartbeat after an error of the SuperLink's (a full disk there), and is gone for good to
the server, though its process is there.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from string import Template
from typing import NoReturn

FLOWER = "1.39"
OPEN_CONTROL = "FEDHET_ALLOW_OPEN_CONTROL"
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec")


class Refused(ValueError):
    """A command that is not to be run; the message is for the operator."""


def main(words: Sequence[str]) -> NoReturn:
    """Check a command and become it.

    Args:
        words: the program and its arguments.
    """
    try:
        command = fill_in(words, os.environ)
        check(command, os.environ)
    except Refused as refusal:
        sys.exit(f"refused to start: {refusal}")
    if command[0] == "flower-supernode":
        become_supernode(command)
    os.execvp(command[0], command)


def become_supernode(command: Sequence[str]) -> NoReturn:
    """Run a SuperNode in this process, which ends with the first of its threads that dies."""
    from flwr.supernode.cli import flower_supernode

    threading.excepthook = end_process
    sys.argv = list(command)
    sys.exit(flower_supernode())


def end_process(died: threading.ExceptHookArgs) -> None:
    """Say why a thread has died, and end the process."""
    threading.__excepthook__(died)
    sys.stderr.write("a thread of the SuperNode has died: it ends, to be started again\n")
    sys.stderr.flush()
    os._exit(1)


def fill_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the words with every ${NAME} replaced.

    Raises:
        Refused: if a name is not in the environment, or empty.
    """
    known = {name: value for name, value in environment.items() if value}
    try:
        return [Template(word).substitute(known) for word in words]
    except KeyError as missing:
        raise Refused(f"{missing.args[0]} is not set: set it in .env or the environment") from None


def check(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the program, its Flower release, and what it would open to others.

    Raises:
        Refused: naming the value, what is allowed, and what to change.
    """
    if not command or command[0] not in PROGRAMS:
        raise Refused(f"{' '.join(command)!r} is none of {', '.join(PROGRAMS)}")
    check_release(importlib.metadata.version("flwr"))
    if command[0] == "flower-superlink":
        check_superlink(command[1:], environment)
    elif command[0] == "flower-supernode":
        check_supernode(command[1:])


def check_release(installed: str) -> None:
    """Refuse a Flower whose ports are not those that this file closes (docs/moving-on.md)."""
    if installed.split(".")[:2] != FLOWER.split("."):
        raise Refused(
            f"flwr {installed} is installed, and these containers are written for {FLOWER}: other "
            f"releases serve Control and the sites on one port. Install flwr=={FLOWER}.0"
        )


def check_superlink(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a SuperLink whose Control others can reach, or that lets unknown nodes in."""
    # Flower's own parser, which also takes abbreviations such as --hos.
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    options = _parse_args_run_superlink().parse_args(arguments)
    if options.insecure:
        raise Refused("--insecure sends models and updates in the clear: give the --ssl-... files")
    if not options.enable_supernode_auth:
        raise Refused("anybody could join as a site: add --enable-supernode-auth")
    check_secret(options, "the executor's secret")
    if environment.get(OPEN_CONTROL) == "yes":
        return
    opened = [options.host]
    if environment.get("FLWR_INTERNAL_GRPC_CONTROL_API") == "1":  # a second one, by gRPC
        opened.append(options.control_api_address.rpartition(":")[0].strip("[]"))
    for host in opened:
        if not is_loopback(host):
            raise Refused(
                f"Control would listen on {host}, and it asks for no login: whoever reaches it can "
                "register nodes and run code at every site. Allowed is a loopback address: "
                f"--host=127.0.0.1 (or, if you know who can reach it, {OPEN_CONTROL}=yes)"
            )


def check_supernode(arguments: Sequence[str]) -> None:
    """Refuse a SuperNode that others than its executor could take work from."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    options = _parse_args_run_supernode().parse_args(arguments)
    if not is_loopback(options.host):
        check_secret(options, f"with --host={options.host} the executor's secret")


def check_secret(options: object, what: str) -> None:
    """Refuse process isolation without a secret that the executor has to know."""
    isolation, secret = (getattr(options, n) for n in ("isolation", "superexec_auth_secret_file"))
    if isolation == "process" and not secret:
        raise Refused(f"{what} is missing: add --superexec-auth-secret-file")


def is_loopback(host: str) -> bool:
    """Return whether every address of a host is this machine's own; False if it has none."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(host) and all(ipaddress.ip_address(one).is_loopback for one in found)


if __name__ == "__main__":
    main(sys.argv[1:])
