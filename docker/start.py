"""Entry point of the containers: checks the command line of a Flower program, then becomes it.

    python start.py flower-superlink --host=127.0.0.1 ...

Flower's Control API, which registers nodes and sends code to them, has no login. Only the address
that it listens on keeps others out, so that address is checked before anything listens. A ${NAME}
in a word is replaced by the environment variable.

A SuperNode ends when one of its threads dies, and Docker restarts it. Without this, Flower 1.39's
SuperNode continues without its heartbeat after an error of the SuperLink, and the server never sees
it again. A SuperLink activates a node only for the owner of its key, which Flower 1.39 does not
check, and it waits for its database. An executor forks its apps from a process that has imported
torch (fork_executor.py).
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
from typing import Any, NoReturn

FLOWER = "1.39"
OPEN_CONTROL = "FEDHET_ALLOW_OPEN_CONTROL"
LOCK_SECONDS = 60
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
    if command[0] == "flower-supernode":
        become_supernode(command)
    if command[0] == "flower-superlink":
        become_superlink(command)
    become_superexec(command)


def become_supernode(command: Sequence[str]) -> NoReturn:
    """Run a SuperNode in this process, which ends when the first of its threads dies."""
    from flwr.supernode.cli import flower_supernode

    threading.excepthook = end_process
    sys.argv = list(command)
    sys.exit(flower_supernode())


def become_superlink(command: Sequence[str]) -> NoReturn:
    """Run a SuperLink in this process, in which no node can speak for another."""
    from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
        NodeAuthServerInterceptor,
    )
    from flwr.supercore import sql_mixin
    from flwr.superlink.cli.flower_superlink import flower_superlink

    check_callers(NodeAuthServerInterceptor)
    wait_for_locks(sql_mixin)
    sys.argv = list(command)
    sys.exit(flower_superlink())


def become_superexec(command: Sequence[str]) -> NoReturn:
    """Run a SuperExec in this process, which forks its apps instead of starting Python anew."""
    import fork_executor
    from flwr.supercore.cli import flower_superexec

    fork_executor.install()
    sys.argv = list(command)
    sys.exit(flower_superexec())


def check_callers(interceptor: Any) -> None:
    """Let Flower's interceptor refuse calls of a node in the name of another.

    Flower 1.39 verifies that a caller owns the key that it calls with, and that the request names
    its node. It does not look at whose key ActivateNode activates: a stranger with a key of its own
    could lock a site out. Nor does it look into the messages that a node pushes: a site could
    answer for another, or send it instructions as if they came from the SuperLink.
    """
    import grpc

    wrap = interceptor._wrap_method_handler

    def wrap_and_check(self: Any, handler: Any, caller: bytes) -> Any:
        served = wrap(self, handler, caller)

        def serve(request: Any, context: Any) -> Any:
            if fault := _in_anothers_name(request, caller):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, fault)
            return served.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    interceptor._wrap_method_handler = wrap_and_check


def _in_anothers_name(request: Any, caller: bytes) -> str | None:
    """Say what a caller may not put into this request; Flower checks ``request.node``."""
    kind = type(request).__name__
    if kind == "ActivateNodeRequest" and request.public_key != caller:
        return "the key of another node"
    if kind == "PushMessagesRequest":
        for sent in (message.metadata for message in request.messages_list):
            if sent.src_node_id != request.node.node_id:
                return "a message of another node"
            if not sent.reply_to_message_id:
                return "a message that is no reply"
    return None


def wait_for_locks(module: Any) -> None:
    """Let each request wait a minute for its turn to write to the SuperLink's database.

    Flower 1.39 waits 5 s, and SQLite gives turns by chance. If several sites send large replies at
    the same time, a request fails, and with it the run, or a node if it is a heartbeat.
    """
    pragmas = {**dict(module.SQLITE_PRAGMAS), "busy_timeout": str(1000 * LOCK_SECONDS)}
    module.SQLITE_PRAGMAS = tuple(pragmas.items())


def end_process(died: threading.ExceptHookArgs) -> None:
    """Print why a thread died, and end the process."""
    threading.__excepthook__(died)
    sys.stderr.write("a thread of the SuperNode died: the process ends, to be restarted\n")
    sys.stderr.flush()
    os._exit(1)


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
    # Flower's own parser also accepts abbreviations such as --hos.
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    options = _parse_args_run_superlink().parse_args(arguments)
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
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    options = _parse_args_run_supernode().parse_args(arguments)
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
