"""The server's messages of SecAgg+, and how it reads the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedhet.common.flower.secagg import RECORD_KEY_CONFIGS, Key
from fedhet.strategies.wire.messages import TIMEOUT
from fedhet.strategies.wire.records import CONFIG, count_bytes, matched, no_reply
from fedhet.strategies.wire.tensor_decoder import printable

_REFUSED = 2  # Flower's code for a ClientApp that raised
T = TypeVar("T")


class SecAggWire:
    """Asks nodes, reads their answers, counts bytes, and notes who is lost and why."""

    def __init__(self, grid: Grid, timeout: float, round: int) -> None:
        self.grid, self.timeout, self.round = grid, timeout, round
        self.bytes_down = self.bytes_up = 0
        self.lost: dict[int, str] = {}

    def ask(
        self,
        stage: str,
        asked: Mapping[int, ConfigRecord],
        read: Callable[[int, ConfigRecord], T],
        contents: Mapping[int, RecordDict] | None = None,
    ) -> dict[int, T]:
        """Return the answers by node, as ``read`` returns them.

        Args:
            stage: of the protocol.
            asked: what each node is told.
            read: checks and reads a node's answer; any error costs that node the round.
            contents: further content of the nodes' messages.
        """
        messages = {
            node: self._message(node, stage, asked[node], (contents or {}).get(node))
            for node in sorted(asked)
        }
        self.bytes_down += sum(_bytes_of(message.content) for message in messages.values())
        found: dict[int, T] = {}
        answers = self.grid.send_and_receive(list(messages.values()), timeout=self.timeout)
        for node, answer in matched(answers, messages):
            if answer.has_content():
                self.bytes_up += _bytes_of(answer.content)
            if node is None or node in self.lost:
                continue
            if answer.has_error():
                self.lost[node] = printable(answer.error.reason)
                continue
            try:
                found[node] = read(node, answer.content.config_records[RECORD_KEY_CONFIGS])
            except Exception as error:  # a client's answer may be anything
                self.lost[node] = f"its answer at {stage!r} cannot be read: {printable(error)}"
        for node in asked.keys() - found.keys() - self.lost.keys():
            self.lost[node] = no_reply(self.timeout)
        return found

    def _message(
        self, node: int, stage: str, configs: ConfigRecord, content: RecordDict | None
    ) -> Message:
        told = ConfigRecord({**configs, Key.STAGE: stage})
        waits = {CONFIG: ConfigRecord({TIMEOUT: self.timeout})}  # where a stage sends no model
        return Message(
            content=RecordDict({**waits, **(content or {}), RECORD_KEY_CONFIGS: told}),
            message_type=MessageType.TRAIN,
            dst_node_id=node,
            group_id=str(self.round),
        )


def error_reply(message: Message, reason: str) -> Message:
    """Return the reply of a client whose ClientApp raised."""
    return Message(Error(code=_REFUSED, reason=reason), reply_to=message)


def _bytes_of(content: RecordDict) -> int:
    """Return the bytes of arrays, and of what the protocol sends as bytes."""
    total = count_bytes(content)
    for record in content.config_records.values():
        for value in record.values():
            parts = value if isinstance(value, list) else [value]
            total += sum(len(part) for part in parts if isinstance(part, bytes))
    return total
