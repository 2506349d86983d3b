"""The gate of Flower's HTTP line: what a site's network reaches of a SuperLink, and what not.

nginx runs with the configuration of common/flower/gate.py, in front of a server of this process
that says what reached it; where nginx is not installed, these tests are skipped.
"""

import base64
import http.client
import importlib.util
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedhet.common.flower import node_identity
from fedhet.common.flower.gate import CALLS, Gate
from fedhet.common.flower.line import HttpLine, installed_line
from tests.compose import DOCKER

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
needs_http = pytest.mark.skipif(
    not isinstance(installed_line(), HttpLine), reason="the installed Flower is of the gRPC line"
)
PROTOBUF = {"Content-Type": "application/protobuf", "Accept": "application/protobuf"}
LOCAL = "127.0.0.1"
Reached = tuple[int, ssl.SSLContext]


def keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_keys", DOCKER / "keys.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Echo(BaseHTTPRequestHandler):
    """Answers with the request's first line, the length of its body, and who it comes from."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        origin = self.headers["x-forwarded-for"]
        said = f"{self.command} {self.path} {len(body)} {origin}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def gate_for(folder: Path, superlink: str) -> Iterator[Reached]:
    """Run a gate in front of an address."""
    own = folder / "server" / "keys"
    port = free_port()
    files = [str(own / name) for name in ("server.crt", "server.key", "ca.crt")]
    command = Gate(f"{LOCAL}:{port}", superlink, *files).command(folder)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex((LOCAL, port)) != 0:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port, ssl.create_default_context(cafile=own / "ca.crt")
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    """Yield the port of a gate, and what trusts its certificate."""
    folder = tmp_path_factory.mktemp("gate")
    keys().make_server(folder / "ca", folder / "server", [])
    own = folder / "server" / "keys"
    inner = ThreadingHTTPServer((LOCAL, 0), Echo)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own / "server.crt", own / "server.key")
    inner.socket = context.wrap_socket(inner.socket, server_side=True)
    threading.Thread(target=inner.serve_forever, daemon=True).start()
    try:
        with gate_for(folder, f"{LOCAL}:{inner.server_address[1]}") as reached:
            yield reached
    finally:
        inner.shutdown()
        inner.server_close()


def answer(
    gate: Reached, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, str]:
    port, context = gate
    client = http.client.HTTPSConnection(LOCAL, port, context=context, timeout=30)
    try:
        client.request(method, path, body, {**PROTOBUF, **headers})
        found = client.getresponse()
        return found.status, found.read().decode(errors="replace")
    finally:
        client.close()


@needs_nginx
@pytest.mark.slow
def test_a_sites_calls_pass_and_the_superlink_sees_whose_they_are(gate):
    for call in CALLS:
        forged = {"X-Forwarded-For": "10.9.9.9"}
        code, said = answer(gate, "POST", f"/v1/fleet/{call}", b"12345", **forged)
        assert (code, said) == (200, f"POST /v1/fleet/{call} 5 {LOCAL}")
    largest = bytes(6 << 20)  # a piece of an array
    assert answer(gate, "POST", "/v1/fleet/push-object", largest)[1].split()[2] == str(6 << 20)
    assert answer(gate, "POST", "/v1/fleet/push-object", bytes(20 << 20))[0] == 413


CONTROL = ["/v1/control/start-run", "/v1/control/register-node", "/v1/control/list-nodes"]
OTHERS = [
    "/",
    "/health",
    "/docs",
    "/openapi.json",
    "/v1/runtime/acquire-task",
    "/v1/runtime/push-messages",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleet/unregister-node",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages/../../control/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol%2fstart-run",
    "/v1/fleet/pull-messages%0d%0aX:y",
    "/V1/FLEET/PULL-MESSAGES",
    "/v1/fleet;/../control/start-run",
    "//v1/control/start-run",
    "/v1//control/start-run",
    "/v1/control/start-run?/v1/fleet/pull-messages",
]


@needs_nginx
@pytest.mark.slow
@pytest.mark.parametrize("path", [*CONTROL, *OTHERS])
def test_nothing_else_reaches_the_superlink(gate, path):
    for method in ("POST", "GET"):
        code, said = answer(gate, method, path)
        assert code in (400, 404), (method, path, code)
        assert "/v1/" not in said


@needs_nginx
@pytest.mark.slow
def test_a_node_without_a_key_is_told_so(gate):
    code, said = answer(gate, "POST", "/v1/fleet/register-node")
    assert code == 412
    assert json.loads(said)["code"] == 2001


@needs_nginx
@pytest.mark.slow
def test_without_a_superlink_a_node_is_told_to_try_again_and_is_not_connected(tmp_path):
    keys().make_server(tmp_path / "ca", tmp_path / "server", [])
    with gate_for(tmp_path, f"{LOCAL}:{free_port()}") as (port, context):
        client = http.client.HTTPSConnection(LOCAL, port, context=context, timeout=30)
        client.request("POST", "/v1/fleet/pull-messages", b"", PROTOBUF)
        found = client.getresponse()
        assert (found.status, found.headers["connection"]) == (503, "close")
        client.close()


@needs_nginx
@pytest.mark.slow
def test_a_call_reaches_the_superlink_only_by_its_own_name_and_method(gate):
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        assert answer(gate, method, "/v1/fleet/pull-messages")[0] == 405
    for path in ("/v1/control/../fleet/get-run", "//v1/fleet/get-run", "/v1/fleet/get-run?a=b"):
        assert answer(gate, "POST", path) == (200, f"POST /v1/fleet/get-run 0 {LOCAL}")
    override = {"X-Original-URL": CONTROL[0], "X-Rewrite-URL": CONTROL[0]}
    override |= {"X-HTTP-Method-Override": "PUT", "Upgrade": "websocket"}
    assert answer(gate, "POST", "/v1/fleet/get-run", **override)[1].startswith("POST /v1/fleet/get")


@needs_nginx
@pytest.mark.slow
def test_no_second_request_is_hidden_in_a_first(gate):
    """Two lengths, or a length and chunks: gate and SuperLink must not read them differently."""
    port, context = gate
    hidden = f"POST {CONTROL[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    heads = [
        f"Content-Length: 0\r\nContent-Length: {len(hidden)}\r\n",
        f"Content-Length: {len(hidden)}\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Content-Length: 0\r\n",  # an honest second request
    ]
    for head in heads:
        with (
            socket.create_connection((LOCAL, port), 30) as plain,
            context.wrap_socket(plain, server_hostname=LOCAL) as one,
        ):
            first = f"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n{head}\r\n"
            one.sendall((first + hidden).encode())
            one.settimeout(1.0)
            said = b""
            try:
                while part := one.recv(65536):
                    said += part
            except TimeoutError:
                pass
        assert CONTROL[0].encode() not in said, head


@needs_nginx
@pytest.mark.slow
def test_plain_text_and_another_ca_are_refused(gate, tmp_path):
    port, _ = gate
    client = http.client.HTTPConnection(LOCAL, port, timeout=30)
    client.request("POST", "/v1/fleet/get-run")
    assert client.getresponse().status == 400
    client.close()
    keys().make_server(tmp_path / "ca", tmp_path / "server", [])
    other = ssl.create_default_context(cafile=tmp_path / "server" / "keys" / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        answer((port, other), "POST", "/v1/fleet/get-run")


# ---- Flower's own routes -------------------------------------------------------------------------


@pytest.fixture
def superlink() -> Any:
    """Return a client of a real SuperLink without a gate, in this process."""
    from fastapi.testclient import TestClient
    from flwr.superlink.main import create_app

    return TestClient(create_app(), raise_server_exceptions=False)


@needs_http
@pytest.mark.slow
def test_flowers_own_port_serves_control_to_everybody(superlink):
    from flwr.proto.control_pb2 import ListNodesResponse

    found = superlink.post("/v1/control/list-nodes", content=b"", headers=PROTOBUF)
    assert found.status_code == 200
    assert ListNodesResponse.FromString(found.content).nodes_info == []


@needs_http
@pytest.mark.slow
def test_the_gate_knows_every_call_of_flowers_fleet(superlink):
    from fastapi.routing import iter_route_contexts

    routes = {getattr(one.route, "path", "") for one in iter_route_contexts(superlink.app.routes)}
    fleet = {path.removeprefix("/v1/fleet/") for path in routes if path.startswith("/v1/fleet/")}
    assert fleet - {*CALLS} == {"register-node", "unregister-node"}  # only for nodes without keys
    assert {*CALLS} <= fleet
    assert {*CONTROL} <= routes


@needs_http
@pytest.mark.slow
def test_no_node_can_speak_for_another(superlink, monkeypatch):
    """Flower's middleware alone serves what is refused here: its gap is still there."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
    )
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
    from flwr.superlink.routers.fleet import node_auth

    monkeypatch.setattr(node_auth, "authenticate_node", node_auth.authenticate_node)
    state = superlink.app.state.linkstate_factory.state()
    mine, theirs = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    public = {key: public_key_to_bytes(key.public_key()) for key in (mine, theirs)}
    ids = {key: state.create_node("", "", public[key], 0) for key in (mine, theirs)}

    def ask(call: str, request: Any, key: Any = mine) -> str:
        stamp = now().isoformat()
        signed = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public[key]).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(
                sign_message(key, stamp.encode())
            ).decode(),
            "flwr-timestamp": stamp,
        }
        content = request.SerializeToString()
        url = f"/v1/fleet/{call}"
        found = superlink.post(url, content=content, headers={**PROTOBUF, **signed})
        return found.json()["detail"] if found.status_code == 401 else "served"

    def push(src: int, answers: str) -> str:
        about = Metadata(run_id=1, src_node_id=src, dst_node_id=1, reply_to_message_id=answers)
        request = PushMessagesRequest(
            node=Node(node_id=ids[mine]), messages_list=[Message(metadata=about)]
        )
        return ask("push-messages", request)

    forged = [(ids[theirs], "question"), (ids[mine], ""), (1, "")]
    assert [push(*one) for one in forged] == ["served"] * 3
    node_identity.mend_http()
    assert [push(*one) for one in forged] == [
        "a message of another node",
        "a message that is no reply",
        "a message of another node",
    ]
    assert push(ids[mine], "question") == "served"
    refused = "Invalid SuperNode authentication"
    lock_out = ActivateNodeRequest(public_key=public[theirs], heartbeat_interval=30.0)
    assert ask("activate-node", lock_out) == refused
    other = PullMessagesRequest(node=Node(node_id=ids[theirs]))
    assert ask("pull-messages", other) == refused
    assert ask("pull-messages", other, theirs) == "served"
