"""What a stranger with the CA's certificate sees of an address."""

import base64
import http.client
import ssl
from collections.abc import Mapping
from pathlib import Path

import grpc


def status_by_method(address: str, certificate: str) -> dict[str, str]:
    from flwr.proto import control_pb2, fleet_pb2

    trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(address, trusted, options) as channel:
        return {
            f"{service.name}/{method.name}": status(channel, f"{service.full_name}/{method.name}")
            for file in (control_pb2, fleet_pb2)
            for service in file.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        }


def status_by_route(address: str, certificate: str) -> dict[str, int]:
    from fastapi.routing import iter_route_contexts
    from flwr.superlink.main import create_app

    found = {}
    for route in (one.route for one in iter_route_contexts(create_app().routes)):
        path, method = str(getattr(route, "path", "")), sorted(getattr(route, "methods", "GET"))[0]
        found[path] = http_status(address, certificate, method, path)
    return found


def http_status(
    address: str,
    certificate: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> int:
    context = ssl.create_default_context(cafile=certificate)
    client = http.client.HTTPSConnection(address, context=context, timeout=20)
    client.request(method, path, body, {"Content-Type": "application/protobuf", **(headers or {})})
    return client.getresponse().status


def activate_by_http(address: str, certificate: str, private_key: str, public_key: str) -> int:
    from cryptography.hazmat.primitives.serialization import (
        load_ssh_private_key,
        load_ssh_public_key,
    )
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    own = load_ssh_private_key(Path(private_key).read_bytes(), None)
    other = public_key_to_bytes(load_ssh_public_key(Path(public_key).read_bytes()))
    stamp = now().isoformat()
    signed = {
        "flwr-public-key": base64.b64encode(public_key_to_bytes(own.public_key())).decode(),
        "flwr-signature": base64.b64encode(sign_message(own, stamp.encode())).decode(),
        "flwr-timestamp": stamp,
    }
    request = ActivateNodeRequest(public_key=other, heartbeat_interval=30.0).SerializeToString()
    path = "/v1/fleet/activate-node"
    return http_status(address, certificate, "POST", path, request, signed)


def activate(address: str, certificate: str, private_key: str, public_key: str) -> str:
    from cryptography.hazmat.primitives.serialization import (
        load_ssh_private_key,
        load_ssh_public_key,
    )
    from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    own = load_ssh_private_key(Path(private_key).read_bytes(), None)
    other = public_key_to_bytes(load_ssh_public_key(Path(public_key).read_bytes()))
    trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(address, trusted, options) as channel:
        signed = grpc.intercept_channel(channel, NodeAuthClientInterceptor(own, own.public_key()))
        try:
            FleetStub(signed).ActivateNode(
                ActivateNodeRequest(public_key=other, heartbeat_interval=30.0), timeout=20
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


def status(channel: grpc.Channel, method: str) -> str:
    try:
        channel.unary_unary(f"/{method}")(b"", timeout=20)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"
