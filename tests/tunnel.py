"""A tunnel to a port, such as ssh's, that can break.

python -m tests.tunnel HOST PORT           prints its own port; "cut" and "mend" come from its input
python -m tests.tunnel HOST PORT OWN_HOST OWN_PORT    listens there until it is ended
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# nginx with a configuration of common/flower/gate.py: the SuperLink's address, then its own.
NGINX = rf"""#!/bin/sh
while [ $# -gt 1 ]; do shift; done
ends=$(sed -nE 's/^ *(server|listen) ([0-9.]+):([0-9]+).*/\2 \3/p' "$1")
cd {ROOT} && exec {sys.executable} -m tests.tunnel $ends
"""


def stand_in_for_nginx(folder: Path) -> Path:
    """Write an `nginx` that passes everything on, for the end of PATH; return its folder.

    With it a federation also runs where nginx is missing. What a gate keeps out is in tests that
    need nginx.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nginx").write_text(NGINX)
    (folder / "nginx").chmod(0o755)
    return folder


class Tunnel:
    """Listens on a port, of 127.0.0.1 by default, and passes on what comes to a host and port."""

    def __init__(self, target: tuple[str, int], own: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target, self._host = target, own[0]
        self._listener = socket.create_server(own)
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._listen()

    def cut(self) -> None:
        """Break all connections, and take no new ones."""
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends = []

    def mend(self) -> None:
        """Take connections again, on the same port."""
        self._listener = socket.create_server((self._host, self.port))
        self._listen()

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    names, ports = sys.argv[1::2], map(int, sys.argv[2::2])
    tunnel = Tunnel(*zip(names, ports, strict=True))
    print(tunnel.port, flush=True)
    if len(names) > 1:
        threading.Event().wait()
    for command in sys.stdin:
        getattr(tunnel, command.strip())()
