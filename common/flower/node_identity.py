"""Issue: a node can speak for another node.

Flower verifies that a caller owns the key that it calls with, and that the request names its node.
It does not look into the messages that a node pushes: a site could answer for another, or send it
instructions as if they came from the SuperLink. 1.39 does not look either at whose key ActivateNode
activates: a stranger with a key of its own could lock a site out.
Mends: `NodeAuthServerInterceptor` of the gRPC Fleet API (1.39), `authenticate_node` of the HTTP
Fleet API (1.40 to 1.42).
Releases: 1.39 to 1.42. Not needed when Flower refuses such calls itself:
`tests/drills/test_docker.py::test_no_node_can_speak_for_another` (gRPC),
`tests/test_gate.py::test_no_node_can_speak_for_another` (HTTP).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Each is in the releases of its line only.
_GRPC = "flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor"
_HTTP = "flwr.superlink.routers.fleet.node_auth"


def mend_grpc() -> None:
    """Mend the gRPC Fleet API of this process's SuperLink."""
    flowers = import_module(_GRPC)
    check_callers(flowers.NodeAuthServerInterceptor, vars(flowers)["grpc"])


def mend_http() -> None:
    """Mend the HTTP Fleet API of this process's SuperLink."""
    check_requests(import_module(_HTTP))


def check_requests(flowers: Any) -> None:
    """Let the module of Flower's middleware check in whose name a node calls."""
    authenticate = flowers.authenticate_node

    def authenticate_and_check(request: Any) -> None:
        authenticate(request)
        if fault := _in_anothers_name(request.state.protobuf_request, None):
            raise flowers.HTTPException(status_code=401, detail=fault)

    flowers.authenticate_node = authenticate_and_check


def check_callers(interceptor: Any, grpc: Any) -> None:
    """Let an interceptor of Flower's check in whose name a node calls."""
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


def _in_anothers_name(request: Any, caller: bytes | None) -> str | None:
    """Say what a caller may not put into this request; Flower checks ``request.node``.

    ``caller`` is its key; None if Flower checks whose key is activated.
    """
    kind = type(request).__name__
    if kind == "ActivateNodeRequest" and caller is not None and request.public_key != caller:
        return "the key of another node"
    if kind == "PushMessagesRequest":
        for sent in (message.metadata for message in request.messages_list):
            if sent.src_node_id != request.node.node_id:
                return "a message of another node"
            if not sent.reply_to_message_id:
                return "a message that is no reply"
    return None
