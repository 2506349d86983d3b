"""Entry point of the containers: checks the command line of a Flower program, then becomes it.

    python start.py flower-superlink --host=127.0.0.1 ...
    python start.py gate --listen=0.0.0.0:9092 --superlink=127.0.0.1:8000 ...

Flower's Control API, which registers nodes and sends code to them, has no login. Only the address
that it listens on keeps others out, so that address is checked before anything listens. A ${NAME}
in a word is replaced by the environment variable.

Flower's HTTP line (1.40 and later) serves the sites on the same port as Control. There the gate, a
reverse proxy, takes the sites' port; the gRPC line (1.39) needs none, and the gate only waits.

fedhet/common/flower mends what Flower's programs lack: a SuperNode ends when one of its threads
dies, tells when it is let in, and answers after a run that was stopped; a SuperLink checks who
calls and waits for its database; an executor forks its apps from a process that has imported torch.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import NoReturn

from fedhet.common.errors import ConfigError
from fedhet.common.flower import (
    database_locks,
    fork_executor,
    programs,
    stopped_runs,
    supernode_activation,
    supernode_threads,
)
from fedhet.common.flower.gate import Gate
from fedhet.common.flower.line import installed_line, installed_release, untried

OPEN_CONTROL = "FEDHET_ALLOW_OPEN_CONTROL"
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "gate")


class Refused(ValueError):
    """The command must not run; the message is for the operator."""


def main(words: Sequence[str]) -> NoReturn:
    """Check a command and become it."""
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"  # Debian's nginx
    try:
        command = for_this_line(fill_in(words, os.environ))
        check(command, os.environ)
    except (Refused, ConfigError) as refusal:
        sys.exit(f"refused to start: {refusal}")
    if warning := untried(installed_release()):
        print(f"WARNING: {warning}", file=sys.stderr)
    if command[0] == "gate":
        become_gate(command[1:])
    mend(command[0])
    programs.become(command)


def become_gate(arguments: Sequence[str]) -> NoReturn:
    """Run the reverse proxy in front of a SuperLink's one port; wait if it has two."""
    if not installed_line().has_gate:
        print(
            f"flwr {installed_release()} serves the sites on a port of its own: no gate is needed"
        )
        sys.stdout.flush()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        sys.exit(0)
    parser = argparse.ArgumentParser(prog="gate")
    for field in fields(Gate):
        parser.add_argument(f"--{field.name}", required=True)
    command = Gate(**vars(parser.parse_args(arguments))).command(Path.cwd())
    os.execvp(command[0], command)


def mend(program: str) -> None:
    """Mend what Flower's programs lack in a deployment (fedhet/common/flower)."""
    if program == "flower-supernode":
        supernode_threads.install()
        supernode_activation.install(Path.cwd() / "activated")
        stopped_runs.install()
    elif program == "flower-superlink":
        installed_line().check_callers()
        database_locks.install()
    elif program == "flower-superexec":
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


def for_this_line(command: Sequence[str]) -> list[str]:
    """Return a command without the words that the installed line of Flower does not need."""
    if command[:1] == ["flower-superlink"]:
        return [command[0], *installed_line().superlink_words(command[1:])]
    return list(command)


def check(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the program, and what it would open to others."""
    if not command or command[0] not in PROGRAMS:
        raise Refused(f"{' '.join(command)!r} is unknown; allowed: {', '.join(PROGRAMS)}")
    if command[0] == "flower-superlink":
        check_superlink(command[1:], environment)
    elif command[0] == "flower-supernode":
        check_supernode(command[1:])
    elif command[0] == "gate" and installed_line().has_gate and not shutil.which("nginx"):
        raise Refused("the gate needs nginx: apt-get install nginx-light")


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
    for host in installed_line().control_hosts(options, environment):
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
