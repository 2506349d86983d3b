"""Issue: a node can speak for another node.

Flower verifies that a caller owns the key that it calls with, and that the request names its node.
It does not look at whose key ActivateNode activates: a stranger with a key of its own could lock a
site out. Nor does it look into the messages that a node pushes: a site could answer for another, or
send it instructions as if they came from the SuperLink.
Mends: `NodeAuthServerInterceptor` of the gRPC Fleet API.
Releases: 1.39. Not needed when Flower refuses such calls itself:
`tests/drills/test_docker.py::test_no_node_can_speak_for_another`.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Let this process's SuperLink refuse calls of a node in the name of another."""
    from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor as flowers

    check_callers(flowers.NodeAuthServerInterceptor, vars(flowers)["grpc"])


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
