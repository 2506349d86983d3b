"""Issue: on the HTTP line, whoever reaches a site's port also reaches Control, which has no login.

A reverse proxy (nginx) stands on the sites' port. It passes the calls of a SuperNode, each by its
name, to the SuperLink's loopback; everything else is answered 404 there. It adds no login: a
SuperNode cannot send a client's certificate, and signs each call with its node's key instead.
Uses: the routes of Flower's Fleet API (`flwr.supernode.fleet_http_client`).
Releases: 1.40 and later. Not needed when Control has a login, or a port of its own:
`tests/test_gate.py::test_flowers_own_port_serves_control_to_everybody`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What a SuperNode with a registered key calls. It neither registers nor unregisters itself.
CALLS = (
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
)
_NO_KEY = "SuperNode authentication is enabled: give --auth-supernode-private-key"
_LARGEST = "16m"  # of a request: Flower sends arrays in pieces of 5 MB
_SECONDS = 120  # for the SuperLink's answer: it waits for its database for 60 s
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
_NGINX = """\
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
worker_processes 2;
events {{ worker_connections 1024; }}
http {{
    {temporary}
    access_log off;
    server_tokens off;
    # An object is passed on when all of it is here, and held in memory.
    client_max_body_size {largest};
    client_body_buffer_size 8m;
    proxy_buffers 16 512k;
    proxy_busy_buffers_size 1m;
    proxy_buffer_size 512k;
    proxy_max_temp_file_size 0;
    proxy_read_timeout {seconds}s;
    proxy_send_timeout {seconds}s;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-For $remote_addr;
    proxy_set_header X-Forwarded-Proto https;
    proxy_ssl_verify on;
    proxy_ssl_trusted_certificate {ca};
    proxy_ssl_name localhost;
    proxy_ssl_session_reuse on;
    upstream superlink {{
        server {superlink};
        keepalive 32;
        keepalive_timeout 3s;  # less than the SuperLink's 5 s: it must not close one that is used
    }}
    server {{
        listen {listen} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        location / {{ return 404; }}
        # While the SuperLink is down, a SuperNode is not connected, and tries again.
        error_page 502 504 @down;
        location @down {{
            keepalive_timeout 0;
            return 503;
        }}
        # What a SuperNode without a key calls; Flower prints the detail.
        location = /v1/fleet/register-node {{
            default_type application/json;
            return 412 '{no_key}';
        }}
        location ~ ^/v1/fleet/({calls})$ {{
            if ($request_method != POST) {{ return 405; }}
            proxy_pass https://superlink/v1/fleet/$1;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Gate:
    """Where the gate listens, the SuperLink behind it, and the files for TLS."""

    listen: str
    superlink: str
    certificate: str
    key: str
    ca: str

    def command(self, folder: Path) -> Sequence[str]:
        """Write nginx's configuration into a folder, and return its command."""
        path = folder / "gate.conf"
        path.write_text(self.configuration(folder), encoding="utf-8")
        return ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(path)]

    def configuration(self, folder: Path) -> str:
        """Return nginx's configuration, with its own files in a folder."""
        temporary = [f"{name}_temp_path {folder}/{name};" for name in _TEMPORARY]
        return _NGINX.format(
            folder=folder,
            temporary="\n    ".join(temporary),
            largest=_LARGEST,
            seconds=_SECONDS,
            listen=self.listen,
            superlink=self.superlink,
            certificate=self.certificate,
            key=self.key,
            ca=self.ca,
            calls="|".join(CALLS),
            no_key=json.dumps({"code": 2001, "detail": _NO_KEY}),
        )
