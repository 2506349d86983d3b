"""Secure aggregation of a round's replies by SecAgg+, as Flower has it.

Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure single-server aggregation with (poly)logarithmic
overhead. CCS 2020. https://eprint.iacr.org/2020/704

The protocol is Flower's own, both halves: its ``secaggplus_mod`` at the client, its
``SecAggPlusWorkflow`` at the server, four exchanges a round:

    setup                    every client makes two key pairs, the server gives out the public keys
    share keys               it shares (Shamir) a mask's seed and a secret key among its neighbours
    collect masked vectors   it trains, and sends  v_i + mask(b_i) +- mask(pairs)  mod 2^32
    unmask                   the neighbours say the shares that take the masks off the sum

Flower drives that from its older API: a workflow on a ``LegacyContext`` whose strategy makes FitIns
and FitRes. What stands here between it and our round is the adapter: our messages travel in the
third exchange, our replies are packed into one vector (reply_vector.py), and the mean of these
comes back as the reply of each client. Beyond that it mends and guards what the workflow leaves:

- A client that is lost before its key shares have arrived has put no mask into any sum, and is
  taken out; the workflow would ask for shares of a key that nobody holds and give the round up.
- A reply that the workflow could not read counts as a lost client.
- A mean of anything but one vector each, as a wrong share gives, is refused.
- Replies travel without their example counts, which Flower's mod leaves in the clear, and as
  numbers of 32 bits, not 64.

A client refuses to send NaN or Inf, since behind masks nobody else can; numbers beyond
``clipping_range`` are cut off, and ``clipped_share`` of metrics.jsonl says how many were. Numbers
are rounded at random, without bias, to multiples of 2 clipping_range / quantization_range.

What it is worth is in docs/privacy.md: it holds against a server that keeps to the protocol and
reads along, not against one that lies; and Flower draws masks from seeds of at most 32 bits.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    bytes_to_ndarray,
    ndarray_to_bytes,
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

from common.errors import ConfigError, require_range, require_whole
from strategies.base import RefusedReplyError, Reply
from strategies.privacy.reply_vector import CLIPPED, Layout, Vector, beyond
from strategies.privacy.seeded_rng import flower_draws_from
from strategies.round.records import (
    CONFIG,
    METRICS,
    UPDATE,
    check_finite,
    count_bytes,
    to_metrics,
    to_record,
)

KEY = "strategy/secure_aggregation"
_MODULUS = 1 << 32  # of Flower's masks
_FINEST = 30  # bits: Flower rounds to 32-bit integers
_LEAST = 3  # of two clients' sum each knows the other's part
_REFUSED = 2  # Flower's code for a ClientApp that raised


@dataclass(frozen=True)
class Exchanged:
    """What a round's exchanges gave.

    Attributes:
        replies: for every client in the sum the mean of all, for every lost one its error.
        bytes_down: of arrays and of the protocol, sent.
        bytes_up: the same, received.
    """

    replies: Sequence[Message]
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class SecAggPlus:
    """The slot: how a round's replies are summed, in Flower's terms.

    Attributes:
        num_shares: among how many of a round's clients a key is shared, itself included: a share of
            the round's clients in (0, 1], or a number, odd and at least 3 (the neighbours of the
            paper, for large rounds).
        reconstruction_threshold: the share of them that can reconstruct it, in (.5, 1]. With fewer
            left the round fails.
        clipping_range: R, numbers are cut off at -R and R.
        quantization_range: how many steps [-R, R] has; None: as many as the sum has room for.
        max_examples: the most examples that a client may have. (A scale: Flower's max_weight.)
    """

    num_shares: float = 1.0
    reconstruction_threshold: float = 0.67  # a majority, however many they are
    clipping_range: float = 8.0
    quantization_range: int | None = None
    max_examples: int = 10_000

    def __post_init__(self) -> None:
        """Check the ranges."""
        key = "strategy.secure_aggregation"
        if self.num_shares > 1 and (self.num_shares < _LEAST or self.num_shares % 2 != 1):
            raise ConfigError(
                f"{key}.num_shares={self.num_shares} is not allowed: it must lie in (0, 1], a share"
                " of the round's clients, or be an odd number from 3 on"
            )
        require_range(f"{key}.num_shares", self.num_shares, open_low=True)
        require_range(
            f"{key}.reconstruction_threshold",
            self.reconstruction_threshold,
            low=0.5,
            high=1.0,
            open_low=True,
        )
        require_range(f"{key}.clipping_range", self.clipping_range, open_low=True)
        if self.quantization_range is not None:
            finest = float(1 << _FINEST)
            require_range(f"{key}.quantization_range", self.quantization_range, low=2, high=finest)
        require_whole(f"{key}.max_examples", self.max_examples, low=1)

    def steps(self, size: int) -> int:
        """Return how many steps [-R, R] has in a sum of so many clients.

        Raises:
            ConfigError: if the sum has no room for them.
        """
        most = (_MODULUS - 1) // size
        if self.quantization_range is None:
            return 1 << min(_FINEST, most.bit_length() - 1)
        if self.quantization_range > most:
            raise ConfigError(
                f"strategy.secure_aggregation.quantization_range={self.quantization_range} times "
                f"{size} clients do not fit into 32 bits: set it to at most {most}, or to null"
            )
        return self.quantization_range

    def step(self, size: int) -> float:
        """Return by how much less than which a client's number is off, in a sum of so many."""
        return 2 * self.clipping_range / self.steps(size)

    def check(self, num_clients: int) -> None:
        """Refuse a federation that has no sum to hide in."""
        if num_clients < _LEAST:
            raise ConfigError(
                f"clients={num_clients}, and a secure sum needs at least {_LEAST}, of which no one "
                f"can tell the others' parts: set clients higher, or {KEY}=none"
            )

    def check_client(self, num_examples: int) -> None:
        """Refuse, at the client, more examples than a vector can say."""
        if num_examples > self.max_examples:
            raise ConfigError(
                "a client has more examples than strategy.secure_aggregation.max_examples="
                f"{self.max_examples}: set that higher"
            )

    # ---- server --------------------------------------------------------------------------------

    def exchange(
        self,
        grid: Grid,
        messages: Mapping[int, Message],
        layout: Layout,
        round: int,
        timeout: float,
    ) -> Exchanged:
        """Send a round's messages and return the mean of the replies in place of each.

        Args:
            grid: Flower's connection to the nodes.
            messages: by client id, one for each client of the round.
            layout: of the replies.
            round: t.
            timeout: seconds to wait, in each of the four exchanges.
        """
        wire = _Wire(grid, len(layout), timeout)
        nodes = {message.metadata.dst_node_id: message for message in messages.values()}
        try:
            mean, summed = self._sum(wire, nodes, round)
            found = layout.unpack(mean, len(summed), self.step(len(nodes)))
        except (_NoSumError, ValueError) as error:  # ValueError: a share that is none
            told = {lost.metadata.src_node_id for lost in wire.errors}
            why = f"no secure sum: {error}"
            replies = [_error(message, why) for node, message in nodes.items() if node not in told]
            return Exchanged([*wire.errors, *replies], wire.bytes_down, wire.bytes_up)
        records = _records(found)
        replies = [  # who is lost after that is in the sum all the same
            error for error in wire.errors if error.metadata.src_node_id not in summed
        ]
        replies += [
            Message(_content(records, found, client), reply_to=message)
            for client, message in messages.items()
            if message.metadata.dst_node_id in summed
        ]
        return Exchanged(replies, wire.bytes_down, wire.bytes_up)

    def _sum(
        self, wire: _Wire, messages: dict[int, Message], round: int
    ) -> tuple[Vector, set[int]]:
        """Return the mean of the nodes' vectors, and whose are in it.

        Raises:
            _NoSumError: if too few are left.
        """
        if len(messages) < _LEAST:
            raise _NoSumError(f"the round has {len(messages)} clients, and needs {_LEAST}")
        workflow = SecAggPlusWorkflow(
            self.num_shares if self.num_shares <= 1 else int(self.num_shares),
            self.reconstruction_threshold,
            max_weight=1.0,
            clipping_range=float(self.clipping_range),  # the clients' mod asks for one
            quantization_range=self.steps(len(messages)),
            modulus_range=_MODULUS,
        )
        legacy, state = _LegacyRound(round, list(messages)), WorkflowState()
        grid, context = cast(Grid, wire), cast(LegacyContext, legacy)
        with flower_draws_from(None):
            for stage in (workflow.setup_stage, workflow.share_keys_stage):
                _require(stage(grid, context, state), stage, state)
                _forget_the_lost(state)
            state.nid_to_fitins = {n: RecordDict({**messages[n].content}) for n in messages}
            collect = workflow.collect_masked_vectors_stage
            _require(collect(grid, context, state), collect, state)
            summed = set(state.active_node_ids)
            unmask = workflow.unmask_stage
            _require(unmask(grid, context, state), unmask, state)
        assert legacy.mean is not None
        return legacy.mean, summed

    # ---- client --------------------------------------------------------------------------------

    def reply(
        self,
        message: Message,
        context: Context,
        train: Callable[[Message], Reply],
        layout: Callable[[Reply], Layout],
        seed: Callable[[Message], np.random.SeedSequence],
    ) -> Message:
        """Return the client's answer in any of the four exchanges, by Flower's mod.

        Args:
            message: of the server.
            context: of the ClientApp: the protocol's keys live in its state.
            train: trains on the message of the third exchange.
            layout: of the reply.
            seed: for rounding at random, which everybody may know.

        Raises:
            RefusedReplyError: for NaN or Inf, and for settings that are not the recipe's.
        """
        self._check_setup(message.content.config_records[RECORD_KEY_CONFIGS])

        def train_and_pack(message: Message, context: Context) -> Message:
            del message.content.config_records[RECORD_KEY_CONFIGS]
            reply = train(message)
            vector = self._packed(reply, layout(reply))
            return Message(fitres_to_recorddict(_fit_result([vector]), False), reply_to=message)

        trains = CONFIG in message.content.config_records
        with flower_draws_from(seed(message) if trains else None):
            answer = secaggplus_mod(_copied(message), context, train_and_pack)
        configs = answer.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS in configs:  # in [0, 2^32), and of 64 bits
            masked = cast(list[bytes], configs[Key.MASKED_PARAMETERS])
            arrays = [bytes_to_ndarray(data) for data in masked]
            configs[Key.MASKED_PARAMETERS] = [
                ndarray_to_bytes(array.astype(np.uint32)) for array in arrays
            ]
        # Flower's mod leaves the example count and the metrics beside it
        return Message(RecordDict({RECORD_KEY_CONFIGS: configs}), reply_to=message)

    def _packed(self, reply: Reply, layout: Layout) -> Vector:
        self.check_client(reply.num_examples)
        for name, tensors in [(UPDATE, {**reply.update, **reply.buffers}), *reply.payloads.items()]:
            check_finite(name, tensors)
        share = beyond(layout.pack(reply), self.clipping_range)
        vector = layout.pack(replace(reply, metrics={**reply.metrics, CLIPPED: share}))
        if not np.isfinite(vector).all():
            raise RefusedReplyError("its metrics are NaN or Inf")
        return vector

    def _check_setup(self, configs: ConfigRecord) -> None:
        """Refuse settings that make less of the protocol than the recipe does."""
        if configs.get(Key.STAGE) != Stage.SETUP:
            return
        size, shares = (int(str(configs[key])) for key in (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER))
        least = self.num_shares if self.num_shares > 1 else round(self.num_shares * size)
        agreed = {
            Key.CLIPPING_RANGE: self.clipping_range,
            Key.TARGET_RANGE: self.steps(size),
            Key.MOD_RANGE: _MODULUS,
            Key.MAX_WEIGHT: 1.0,
            Key.THRESHOLD: max(2, round(self.reconstruction_threshold * shares)),
        }
        wrong = sorted(name for name, value in agreed.items() if configs[name] != value)
        if wrong or size < _LEAST or shares < least:
            raise RefusedReplyError(
                f"the server's settings of SecAgg+ are not the recipe's: {wrong or dict(configs)}"
            )


class _NoSumError(Exception):
    """A round without a sum; the message says why."""


def _require(passed: bool, stage: Callable[..., bool], state: WorkflowState) -> None:
    if not passed:
        name = stage.__name__.removesuffix("_stage").replace("_", " ")
        raise _NoSumError(
            f"after {name!r} {len(state.active_node_ids)} clients were left, and every one needs "
            f"{state.threshold} of those it shares with, itself included "
            "(strategy.secure_aggregation.reconstruction_threshold)"
        )


def _forget_the_lost(state: WorkflowState) -> None:
    """Take clients that sent no key shares out: no mask of theirs is in any vector."""
    left = set(state.active_node_ids)
    state.sampled_node_ids = left
    state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & left for node in left}


class _LegacyRound:
    """All that the workflow's stages ask of Flower's older context, strategy and client manager."""

    def __init__(self, round: int, nodes: Sequence[int]) -> None:
        self.state = RecordDict(
            {
                MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: round}),
                MAIN_PARAMS_RECORD: ArrayRecord(),
            }
        )
        self.nodes = nodes
        self.strategy = self.client_manager = self
        self.mean: Vector | None = None

    def configure_fit(self, *_: object) -> list[tuple[SimpleNamespace, FitIns]]:
        """Return the round's nodes; what they are sent is put in afterwards."""
        return [(SimpleNamespace(node_id=n), FitIns(Parameters([], ""), {})) for n in self.nodes]

    def num_available(self) -> int:
        """Return how many there are, for a log line."""
        return len(self.nodes)

    def aggregate_fit(
        self, round: int, results: Sequence[tuple[SimpleNamespace, FitRes]], failures: object
    ) -> tuple[None, dict[str, Any]]:
        """Take the mean, which the workflow puts into every result."""
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class _Wire:
    """A grid for the workflow: counts what travels, and gives on what the workflow can read."""

    def __init__(self, grid: Grid, length: int, timeout: float) -> None:
        self.grid, self.length, self.timeout = grid, length, timeout
        self.bytes_down = self.bytes_up = 0
        self.errors: list[Message] = []

    def send_and_receive(
        self, messages: Sequence[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the answers; those that say nothing that the stage can use are errors."""
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
                    answer = _error(original, f"its answer at {str(stage)!r} cannot be read")
            if answer.has_error():
                self.errors.append(answer)
            else:  # the workflow reads Flower's older records, too, which tell it nothing here
                answer = copy.copy(answer)
                nothing = fitres_to_recorddict(_fit_result([]), False)
                answer.content = RecordDict({**answer.content, **nothing})
            answers.append(answer)
        return answers

    def _readable(self, stage: str, content: RecordDict) -> bool:
        configs = content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        try:
            if stage == Stage.SETUP:
                return all(
                    isinstance(configs[k], bytes) for k in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)
                )
            if stage == Stage.SHARE_KEYS:
                return _paired(configs[Key.DESTINATION_LIST], configs[Key.CIPHERTEXT_LIST])
            if stage == Stage.UNMASK:
                return _paired(configs[Key.NODE_ID_LIST], configs[Key.SHARE_LIST])
            masked = cast(list[bytes], configs[Key.MASKED_PARAMETERS])
            arrays = [np.load(io.BytesIO(data), allow_pickle=False) for data in masked]
        except (KeyError, TypeError, ValueError, EOFError):
            return False
        return [(a.shape, a.dtype) for a in arrays] == [
            ((1,), np.uint32),
            ((self.length,), np.uint32),
        ]


def _paired(nodes: object, values: object) -> bool:
    return (
        isinstance(nodes, list)
        and isinstance(values, list)
        and len(nodes) == len(values)
        and all(isinstance(node, int) for node in nodes)
        and all(isinstance(value, bytes) for value in values)
    )


def _fit_result(arrays: list[Vector]) -> FitRes:
    return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(arrays)), 1, {})


def _records(mean: Reply) -> dict[str, ArrayRecord]:
    """Return the mean client's records: they are serialised once."""
    payloads = {name: to_record(tensors) for name, tensors in mean.payloads.items()}
    return {UPDATE: to_record({**mean.update, **mean.buffers}), **payloads}


def _content(records: Mapping[str, ArrayRecord], mean: Reply, client: int) -> RecordDict:
    metrics = to_metrics({**mean.metrics, "partition-id": client})
    return RecordDict({**records, METRICS: metrics})


def _copied(message: Message) -> Message:
    """Return the message with a content of its own: Flower's mod takes entries out of it."""
    copied = copy.copy(message)
    configs = ConfigRecord({**message.content.config_records[RECORD_KEY_CONFIGS]})
    copied.content = RecordDict({**message.content, RECORD_KEY_CONFIGS: configs})
    return copied


def _error(message: Message, reason: str) -> Message:
    return Message(Error(code=_REFUSED, reason=reason), reply_to=message)


def _bytes_of(content: RecordDict) -> int:
    """Return the bytes of arrays, and of what the protocol sends as bytes."""
    total = count_bytes(content)
    for record in content.config_records.values():
        for value in record.values():
            parts = value if isinstance(value, list) else [value]
            total += sum(len(part) for part in parts if isinstance(part, bytes))
    return total
