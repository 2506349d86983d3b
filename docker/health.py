"""Health check of a container: exit code 0 if it is healthy, else 1 with the reason.

python health.py https://127.0.0.1:8000/health --ca ca.crt    a SuperLink
python health.py http://127.0.0.1:9094/health --connected-to host:9092 --file activated    a node
python health.py --connected-to 127.0.0.1:8000    an executor, which asks for work every second
python health.py tcp://127.0.0.1:9092    a gate
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

SECONDS = 5.0


def main() -> None:
    """Run the checks of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", nargs="?", help="http://, https:// or tcp://")
    parser.add_argument("--ca", type=Path, help="the certificate of the server's CA")
    parser.add_argument(
        "--connected-to", metavar="HOST:PORT", help="what it must be connected to, or ${NAME}"
    )
    parser.add_argument("--file", type=Path, help="a file that must exist")
    options = parser.parse_args()
    try:
        if options.file:
            options.file.stat()
        if options.url and urlsplit(options.url).scheme == "tcp":
            connect(urlsplit(options.url).netloc)
        elif options.url:
            ask_http(options.url, options.ca)
        if options.connected_to:
            require_connection(os.path.expandvars(options.connected_to))
    except Exception as error:
        sys.exit(f"unhealthy: {type(error).__name__}: {error}")


def ask_http(url: str, ca: Path | None) -> None:
    """Get a page; raise if that fails."""
    context = ssl.create_default_context(cafile=ca) if ca else None
    https = urllib.request.HTTPSHandler(context=context)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    opener.open(url, timeout=SECONDS).close()


def connect(address: str) -> str:
    """Open a connection and close it; return the other end's address. Raise if that fails."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), SECONDS) as opened:
        return str(opened.getpeername()[0])


def require_connection(address: str) -> None:
    """Raise unless this network namespace has a connection to an address and can open another.

    An open connection alone may remain when the network is gone; a new connection alone says
    nothing about the SuperNode.
    """
    import psutil

    host, port = connect(address), int(address.rpartition(":")[2])
    for one in psutil.net_connections(kind="tcp"):
        if one.status != psutil.CONN_ESTABLISHED or not one.raddr:
            continue
        if (one.raddr.ip.removeprefix("::ffff:"), one.raddr.port) == (host, port):  # gRPC's form
            return
    raise ConnectionError(f"there is no connection to {address}")


if __name__ == "__main__":
    main()
