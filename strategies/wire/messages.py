"""The server's messages: a model, payloads and the clients' config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedhet.strategies.base import Payloads, RefusedReplyError, Tensors
from fedhet.strategies.slots import Schedule
from fedhet.strategies.wire.border import content_of
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.compressed_records import Downlink
from fedhet.strategies.wire.records import CONFIG, KEPT, PARAMS, matched, no_reply, to_record

TIMEOUT, NUM_ROUNDS = "timeout-seconds", "num-rounds"  # in the clients' config
_CLOCK_SKEW_SECONDS = 3600.0  # by which a site's clock may be ahead of the server's


@dataclass(frozen=True)
class MessageWriter:
    """Writes the messages of a round. ``more`` are further entries of the clients' config."""

    nodes: Mapping[int, int]  # by client id
    versions: ClientVersions
    local_lr: float  # eta_l
    schedule: Schedule  # its factor per round
    downlink: Downlink  # writes the records of train messages

    def lr(self, round: int, more: ConfigRecord) -> float:
        """Return the local learning rate of a round; of round 0, that of the first."""
        last = int(str(more.get(NUM_ROUNDS, round)))
        return self.local_lr * self.schedule(max(round, 1), max(last, 1))

    def train(
        self,
        round: int,
        arrays: ArrayRecord,
        more: ConfigRecord,
        cohort: Iterable[int],
        broadcast: Callable[[int], Payloads],
    ) -> dict[int, Message]:
        """Return the train messages by client: x, and the payloads of ``broadcast(client)``."""
        # A payload that many clients get is serialised once. Beside its record it keeps its id.
        records: dict[int, tuple[Tensors, ArrayRecord]] = {}
        messages, params = {}, self.downlink.params(arrays, round)
        common = self._common(round, more)
        for client in cohort:
            content, payloads = RecordDict({PARAMS: params}), broadcast(client)
            for name, tensors in payloads.items():
                if id(tensors) not in records:
                    records[id(tensors)] = (tensors, self.downlink.payload(name, tensors, round))
                content[name] = records[id(tensors)][1]
            content[CONFIG] = self._config(common, client, self.downlink.config(payloads))
            messages[client] = self._message(content, MessageType.TRAIN, client, common)
        return messages

    def model(
        self,
        message_type: str,
        round: int,
        arrays: ArrayRecord,
        more: ConfigRecord,
        clients: Iterable[int],
    ) -> dict[int, Message]:
        """Return messages with a model alone, by client."""
        common, messages = self._common(round, more), {}
        for client in clients:
            content = RecordDict({PARAMS: arrays, CONFIG: self._config(common, client, {})})
            messages[client] = self._message(content, message_type, client, common)
        return messages

    @cached_property
    def _kept(self) -> ArrayRecord:
        """What clients' own tensors begin as, serialised once."""
        return to_record(self.versions.kept)

    def _common(self, round: int, more: ConfigRecord) -> ConfigRecord:
        """Return what all clients' configs of a round have: Flower checks every entry."""
        return ConfigRecord(
            {
                **more,
                "round": round,
                NUM_ROUNDS: int(str(more.get(NUM_ROUNDS, round))),
                "lr": self.lr(round, more),
                TIMEOUT: timeout_of(more),
            }
        )

    def _config(
        self, common: ConfigRecord, client: int, about: Mapping[str, list[str]]
    ) -> ConfigRecord:
        config = common.copy()
        config.update({**about, **self.versions.config_of(client)})
        return config

    def _message(
        self, content: RecordDict, message_type: str, client: int, common: ConfigRecord
    ) -> Message:
        """Return a message, with what a client without a state begins as.

        No node starts on it long after the round has ended.
        """
        if self.versions.kept and client not in self.versions.committed:
            content[KEPT] = self._kept
        return Message(
            content=content,
            message_type=message_type,
            dst_node_id=self.nodes[client],
            ttl=timeout_of(common) + _CLOCK_SKEW_SECONDS,
            group_id=str(common["round"]),  # nodes log it
        )


def timeout_of(config: Mapping[str, Any]) -> float:
    """Return how many seconds the server waits for the replies."""
    return float(str(config.get(TIMEOUT, 3600.0)))


def query(grid: Grid, messages: Mapping[int, Message], timeout: float) -> dict[int, RecordDict]:
    """Return the answers to the messages by client.

    Logs clients that answer with an error, or not at all, and leaves them out.
    """
    replies = grid.send_and_receive(list(messages.values()), timeout=timeout)
    by_client = {client: reply for client, reply in matched(replies, messages)}
    answers = {}
    for client, message in sorted(messages.items()):
        reply = by_client.get(client)
        try:
            if reply is None:
                raise RefusedReplyError(no_reply(timeout))
            answers[client] = content_of(reply)
        except RefusedReplyError as why:
            log(WARNING, "%s of client %s: %s", message.metadata.message_type, client, why)
    return answers
