"""Runs Flower's SecAgg+ workflow for one of our rounds (server half of secure aggregation).

``SecAggPlusWorkflow`` belongs to Flower's older API: it runs on a ``LegacyContext`` whose strategy
makes FitIns and FitRes. This adapter carries our messages in the workflow's third exchange and
returns the mean of the clients' vectors. It also fills gaps of the workflow:

- A client that is lost before its key shares have arrived has put no mask into any sum and is
  removed; the workflow would ask for shares of a key that nobody holds and give up the round.
- A reply that the workflow cannot read counts as a lost client.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import (
    SecAggPlusWorkflow,
    WorkflowState,
)
from flwr.serverapp import Grid

from strategies.privacy.reply_vector import Vector
from strategies.privacy.seeded_rng import seeded_numpy
from strategies.round.records import count_bytes

_REFUSED = 2  # Flower's code for a ClientApp that raised


class NoSumError(Exception):
    """A round without a sum; the message says why."""


def sum_vectors(
    workflow: SecAggPlusWorkflow, grid: SecAggGrid, messages: Mapping[int, Message], round: int
) -> tuple[Vector, set[int]]:
    """Return the mean of the clients' vectors, and the nodes that are in it.

    Raises:
        NoSumError: if too few clients are left.
    """
    legacy, state = _LegacyRound(round, list(messages)), WorkflowState()
    wire, context = cast(Grid, grid), cast(LegacyContext, legacy)

    def run(name: str) -> None:
        if not getattr(workflow, f"{name}_stage")(wire, context, state):
            raise NoSumError(
                f"after {name.replace('_', ' ')!r} {len(state.active_node_ids)} clients were left, "
                f"and each needs {state.threshold} of the clients it shares with, itself included "
                "(strategy.secure_aggregation.reconstruction_threshold)"
            )

    with seeded_numpy(None):
        for name in ("setup", "share_keys"):
            run(name)
            left = set(state.active_node_ids)  # no mask of a lost client is in any vector yet
            state.sampled_node_ids = left
            state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & left for node in left}
        state.nid_to_fitins = {n: RecordDict({**messages[n].content}) for n in messages}
        run("collect_masked_vectors")
        summed = set(state.active_node_ids)
        run("unmask")
    assert legacy.mean is not None
    return legacy.mean, summed


def fit_result(arrays: list[Vector]) -> RecordDict:
    """Return arrays as the FitRes records that Flower's workflow and mod read."""
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(arrays)), 1, {})
    return fitres_to_recorddict(result, False)


def error_reply(message: Message, reason: str) -> Message:
    """Return the reply of a client whose ClientApp raised."""
    return Message(Error(code=_REFUSED, reason=reason), reply_to=message)


class _LegacyRound:
    """The parts of Flower's older context, strategy and client manager that the stages use."""

    def __init__(self, round: int, nodes: Sequence[int]) -> None:
        configs = ConfigRecord({WorkflowKey.CURRENT_ROUND: round})
        self.state = RecordDict({MAIN_CONFIGS_RECORD: configs, MAIN_PARAMS_RECORD: ArrayRecord()})
        self.nodes = nodes
        self.strategy = self.client_manager = self
        self.mean: Vector | None = None

    def configure_fit(self, *_: object) -> list[tuple[SimpleNamespace, FitIns]]:
        """Return the round's nodes; their messages are filled in later."""
        return [(SimpleNamespace(node_id=n), FitIns(Parameters([], ""), {})) for n in self.nodes]

    def num_available(self) -> int:
        """Return the number of nodes, for a log line."""
        return len(self.nodes)

    def aggregate_fit(
        self, round: int, results: Sequence[tuple[SimpleNamespace, FitRes]], failures: object
    ) -> tuple[None, dict[str, Any]]:
        """Keep the mean, which the workflow puts into every result."""
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class SecAggGrid:
    """A grid for the workflow: counts bytes and passes on replies that the workflow can read."""

    def __init__(self, grid: Grid, length: int, timeout: float) -> None:
        self.grid, self.length, self.timeout = grid, length, timeout
        self.bytes_down = self.bytes_up = 0
        self.errors: list[Message] = []

    def send_and_receive(
        self, messages: Sequence[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the answers; an answer that the stage cannot read becomes an error."""
        asked = {message.metadata.dst_node_id: message for message in messages}
        self.bytes_down += sum(_bytes_of(message.content) for message in messages)
        answers = []
        for answer in self.grid.send_and_receive(messages, timeout=self.timeout):
            if answer.has_content():
                self.bytes_up += _bytes_of(answer.content)
                original = asked.pop(answer.metadata.src_node_id, None)
                if original is None:
                    continue
                stage = original.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
                if not self._readable(str(stage), answer.content):
                    answer = error_reply(original, f"its answer at {str(stage)!r} cannot be read")
            if answer.has_error():
                self.errors.append(answer)
            else:  # the workflow also reads Flower's older records, which are empty here
                answer = copy.copy(answer)
                answer.content = RecordDict({**answer.content, **fit_result([])})
            answers.append(answer)
        return answers

    def _readable(self, stage: str, content: RecordDict) -> bool:
        configs = content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        try:
            if stage == Stage.SETUP:
                keys = (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)
                return all(isinstance(configs[key], bytes) for key in keys)
            if stage == Stage.SHARE_KEYS:
                return _paired(configs[Key.DESTINATION_LIST], configs[Key.CIPHERTEXT_LIST])
            if stage == Stage.UNMASK:
                return _paired(configs[Key.NODE_ID_LIST], configs[Key.SHARE_LIST])
            masked = cast(list[bytes], configs[Key.MASKED_PARAMETERS])
            arrays = [np.load(io.BytesIO(data), allow_pickle=False) for data in masked]
        except (KeyError, TypeError, ValueError, EOFError):
            return False
        expected = [((length,), np.uint32) for length in (1, self.length)]
        return [(array.shape, array.dtype) for array in arrays] == expected


def _paired(nodes: object, values: object) -> bool:
    return (
        isinstance(nodes, list)
        and isinstance(values, list)
        and len(nodes) == len(values)
        and all(isinstance(node, int) for node in nodes)
        and all(isinstance(value, bytes) for value in values)
    )


def _bytes_of(content: RecordDict) -> int:
    """Return the bytes of arrays, and of what the protocol sends as bytes."""
    total = count_bytes(content)
    for record in content.config_records.values():
        for value in record.values():
            parts = value if isinstance(value, list) else [value]
            total += sum(len(part) for part in parts if isinstance(part, bytes))
    return total
