"""An evaluation at the clients: its messages, their answers, and what these may report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import Message
from flwr.common.logger import log

from fedhet.common.metrics import CLIENT, row_key
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.registration import ClientRegistry
from fedhet.strategies.wire.border import decode_evaluation
from fedhet.strategies.wire.messages import timeout_of
from fedhet.strategies.wire.records import UNASKED, config_of, matched, no_reply

_RECEIVED = ("received-", "personal-test-", "personal-")  # prefixes in train replies
_SCORES = ("loss", "accuracy")


@dataclass(frozen=True)
class EvaluationRound:
    """The messages of an evaluation; iterating yields them, as Flower expects."""

    # to the clients that evaluate, by client id
    messages: Mapping[int, Message] = field(default_factory=dict)
    # why answers are missing, once they have been read
    failures: list[str] = field(default_factory=list)
    # with evaluation.per_client each client's values by name and id
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


@dataclass(frozen=True)
class ClientMetrics:
    """The metrics of the recipe at the clients."""

    names: tuple[str, ...] = ()  # of the values that a client may send: ``f1``, ``f1/<class>``
    per_client: bool = False  # whether a row of metrics.jsonl has each client's own values, too
    asked: bool = False  # whether clients evaluate the output in an exchange of its own

    @property
    def in_train_replies(self) -> set[str]:
        """The names in train replies: of the received model, and of the client's own."""
        return {f"{prefix}{name}" for prefix in _RECEIVED for name in self.names}

    def of_training(
        self, replies: Iterable[tuple[int, Mapping[str, float]]]
    ) -> dict[str, dict[int, float]]:
        """Return the values of train replies by name and client; empty unless ``per_client``."""
        return self._table(replies, {p + n: p + n for p in _RECEIVED for n in self._all})

    def of_evaluation(self, rows: Iterable[Mapping[str, float]]) -> dict[str, dict[int, float]]:
        """Return the values of evaluations by name and client; empty unless ``per_client``."""
        replies = [(int(row["partition-id"]), row) for row in rows]
        return self._table(replies, {name: f"{CLIENT}{name}" for name in self._all})

    @property
    def _all(self) -> list[str]:
        return list(dict.fromkeys((*_SCORES, *self.names)))

    def _table(
        self, replies: Iterable[tuple[int, Mapping[str, float]]], names: Mapping[str, str]
    ) -> dict[str, dict[int, float]]:
        if not self.per_client:
            return {}
        found: dict[str, dict[int, float]] = {}
        for client, metrics in replies:
            for name, title in names.items():
                if name in metrics:
                    found.setdefault(row_key(title), {})[client] = metrics[name]
        return found
