"""Health check of a container: exit code 0 if it is healthy, else 1 with the reason.

python health.py https://127.0.0.1:8000/health --ca ca.crt    a SuperLink
python health.py http://127.0.0.1:9094/health --connected-to host:9092    a SuperNode and SuperLink
python health.py grpc://127.0.0.1:9096    an executor
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
    parser.add_argument("url", help="http://, https:// or grpc://")
    parser.add_argument("--ca", type=Path, help="the certificate of the server's CA")
    parser.add_argument(
        "--connected-to", metavar="HOST:PORT", help="the SuperLink; ${NAME} is one too"
    )
    options = parser.parse_args()
    try:
        if urlsplit(options.url).scheme == "grpc":
            ask_grpc(urlsplit(options.url).netloc)
        else:
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


def ask_grpc(address: str) -> None:
    """Query gRPC's health service."""
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        HealthStub(channel).Check(HealthCheckRequest(), timeout=SECONDS)


def require_connection(address: str) -> None:
    """Raise unless this network namespace has a connection to an address and can open another.

    An open connection alone may remain when the network is gone; a new connection alone says
    nothing about the SuperNode.
    """
    import psutil

    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    for one in psutil.net_connections(kind="tcp"):
        if one.raddr and one.raddr.port == int(port) and one.status == psutil.CONN_ESTABLISHED:
            return
    raise ConnectionError(f"there is no connection to port {port} of a SuperLink")


if __name__ == "__main__":
    main()
