"""An evaluation at the clients: its messages and their answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import Message
from flwr.common.logger import log

from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.registration import ClientRegistry
from fedhet.strategies.wire.border import decode_evaluation
from fedhet.strategies.wire.messages import timeout_of
from fedhet.strategies.wire.records import UNASKED, config_of, matched, no_reply


@dataclass(frozen=True)
class EvaluationRound:
    """The messages of an evaluation; iterating yields them, as Flower expects.

    Attributes:
        messages: to the clients that evaluate, by client id.
        failures: why answers are missing, once they have been read.
        per_client: with evaluation.per_client each client's values by name and id.
    """

    messages: Mapping[int, Message] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    per_client: dict[str, dict[int, float]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Message]:
        """Yield the messages."""
        return iter(self.messages.values())


@dataclass(frozen=True)
class EvaluationReplies:
    """The answers to an evaluation; ``aggregate_evaluate`` needs both."""

    round: EvaluationRound
    replies: Iterable[Message]

    def __iter__(self) -> Iterator[Message]:
        """Yield the answers."""
        return iter(self.replies)


def valid_evaluations(
    replies: Iterable[Message],
    asked: Mapping[int, Message],
    registry: ClientRegistry,
    metrics: Collection[str] = (),
) -> tuple[list[dict[str, float]], list[str]]:
    """Return the clients' valid evaluation metrics by client id, and why others are missing.

    Args:
        replies: to the messages.
        asked: the messages, by client id.
        registry: what the clients have registered.
        metrics: the names that a client may send beside accuracy and loss.
    """
    silent, rows, failures = dict(asked), {}, []
    for client, message in matched(replies, asked):
        if client is None:
            failures.append(f"node {message.metadata.src_node_id}, evaluation: {UNASKED}")
            continue
        del silent[client]
        try:
            most = max(registry.num_examples[client], registry.num_held_out[client])
            rows[client] = decode_evaluation(message, client, most, metrics)
        except RefusedReplyError as refusal:
            failures.append(f"client {client}, evaluation: {refusal}")
    for client, message in silent.items():
        why = no_reply(timeout_of(config_of(message)))
        failures.append(f"client {client}, evaluation: {why}")
    for failure in failures:
        log(WARNING, "%s", failure)
    return [rows[client] for client in sorted(rows)], failures
