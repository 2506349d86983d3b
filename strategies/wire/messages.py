"""The server's messages, a model, payloads and the clients' config, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedhet.strategies.base import ClientSide, Payloads, RefusedReplyError, Shapes, Tensors
from fedhet.strategies.slots import Schedule
from fedhet.strategies.wire.array_codec import bytes_of, size_of
from fedhet.strategies.wire.border import content_of
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.compressed_records import Downlink
from fedhet.strategies.wire.compression import Codec
from fedhet.strategies.wire.records import (
    CONFIG,
    KEPT,
    PARAMS,
    known_shapes,
    matched,
    no_reply,
    to_record,
)

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


def bytes_moved(
    downlink: Downlink,
    client_sides: Mapping[str, ClientSide],
    arrays: ArrayRecord,
    payloads: Payloads,
    expected: Shapes,
) -> int:
    """Return the array bytes of a train message and of its reply, before anything is sent.

    Args:
        downlink: what is compressed, and with which codecs.
        client_sides: the methods' client halves; payloads of unknown shapes count nothing.
        arrays: x and its buffers.
        payloads: that go down.
        expected: the shapes of payloads that come up.
    """
    compression, compressed = downlink.compression, downlink.payloads
    trained = [name for name in arrays if name not in downlink.buffers]
    moved = [name for name in trained if name not in downlink.untrained]
    total = 2 * sum(bytes_of(arrays[name]) for name in arrays if name in downlink.buffers)
    for codec, names in ((compression.codec_down, trained), (compression.up, moved)):
        sizes = [(tuple(arrays[n].shape), getattr(torch, arrays[n].dtype)) for n in names]
        total += _record(sizes, codec)
    for name, tensors in payloads.items():
        sizes = [(tuple(value.shape), value.dtype) for value in tensors.values()]
        total += _record(sizes, compression.codec_down if name in compressed else None)
    sides = client_sides.values()
    dtypes = {name: kind for side in sides for name, kind in side.dtypes.items()}
    sent = {name for side in sides for name in side.sends}
    for name, shapes in known_shapes(expected).items():
        if name in sent:
            sizes = [
                (shape, dtypes.get(name) or _dtype_of(tensor, arrays))
                for tensor, shape in shapes.items()
            ]
            total += _record(sizes, compression.up if name in compressed else None)
    return total


def _dtype_of(tensor: str, arrays: ArrayRecord) -> torch.dtype:
    """Return the model's own type for what has a parameter's name, else float32."""
    return getattr(torch, arrays[tensor].dtype) if tensor in arrays else torch.float32


def _record(sizes: list[tuple[tuple[int, ...], torch.dtype]], codec: Codec | None) -> int:
    if codec is None:
        return sum(size_of(dtype, shape) for shape, dtype in sizes)
    return _coded(codec, sum(math.prod(shape) for shape, _ in sizes))


def _coded(codec: Codec, length: int) -> int:
    arrays = codec.arrays(length) if length else {}
    return sum(size_of(dtype, (size,)) for size, dtype in arrays.values())
