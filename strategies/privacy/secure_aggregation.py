"""Secure aggregation of a round's replies with Flower's SecAgg+.

Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure single-server aggregation with (poly)logarithmic
overhead. CCS 2020. https://eprint.iacr.org/2020/704

Both halves of the protocol are Flower's: ``secaggplus_mod`` at the client, and at the server
``SecAggPlusWorkflow`` (adapted by strategies/privacy/secagg_workflow.py). The four exchanges are:

    setup                    every client makes two key pairs; the server distributes public keys
    share keys               it shares (Shamir) a mask's seed and a secret key among its neighbours
    collect masked vectors   it trains, and sends  v_i + mask(b_i) +- mask(pairs)  mod 2^32
    unmask                   the neighbours send the shares that remove the masks from the sum

v_i is the client's reply as one vector (strategies/privacy/reply_vector.py). The mean of all
vectors comes back as the reply of each client; a mean of anything but one vector per client, as a
wrong share produces, is rejected. Replies travel without their example counts, which Flower's mod
sends unmasked, and as numbers of 32 bits instead of 64.

A client refuses to send NaN or Inf, because nobody can see them behind masks. Numbers beyond
``clipping_range`` are cut off; ``clipped_share`` in metrics.jsonl is their share. Numbers are
rounded at random, without bias, to multiples of 2 clipping_range / quantization_range.

docs/privacy.md describes the security: it holds against a server that follows the protocol and
reads along, not against a malicious one, and Flower draws masks from seeds of at most 32 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid

from common.errors import ConfigError, require_range, require_whole
from strategies.base import RefusedReplyError, Reply
from strategies.privacy.reply_vector import CLIPPED, Layout, Vector
from strategies.privacy.secagg_workflow import (
    NoSumError,
    SecAggGrid,
    error_reply,
    fit_result,
    sum_vectors,
)
from strategies.privacy.seeded_rng import seeded_numpy
from strategies.round.decoder import check_finite
from strategies.round.records import CONFIG, METRICS, UPDATE, to_metrics, to_record

KEY = "strategy/secure_aggregation"
_MODULUS = 1 << 32  # of Flower's masks
_FINEST = 30  # bits: Flower rounds to 32-bit integers
_LEAST = 3  # from a sum of two, each client knows the other's part


@dataclass(frozen=True)
class Exchanged:
    """The replies of a round and the bytes that its exchanges took.

    Attributes:
        replies: the mean of all for every client in the sum, an error for every lost one.
        bytes_down: of arrays and of the protocol, sent.
        bytes_up: the same, received.
    """

    replies: Sequence[Message]
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class SecAggPlus:
    """SecAgg+ with Flower's settings; ``exchange`` is the server half, ``reply`` the client half.

    Attributes:
        num_shares: the number of clients that share a key, its owner included: a fraction of the
            round's clients in (0, 1], or an odd number from 3 (the paper's neighbours).
        reconstruction_threshold: the fraction of them that can reconstruct it, in (.5, 1]; with
            fewer left the round fails.
        clipping_range: R; numbers are cut off at -R and R.
        quantization_range: number of steps in [-R, R]; None: as many as the sum has room for.
        max_examples: the most examples that a client may have (Flower's max_weight).
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
                f"{key}.num_shares={self.num_shares} is not allowed: it must be a "
                "fraction of the round's clients in (0, 1], or an odd number from 3"
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
        """Return the number of steps in [-R, R] for a sum of ``size`` clients.

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
        """Return the step that a client's numbers are rounded to, in a sum of ``size`` clients."""
        return 2 * self.clipping_range / self.steps(size)

    def check(self, num_clients: int) -> None:
        """Reject a federation that is too small to hide a client in a sum."""
        if num_clients < _LEAST:
            raise ConfigError(
                f"clients={num_clients} is not enough: a secure sum needs at least {_LEAST}; set "
                f"clients higher, or {KEY}=none"
            )

    def check_client(self, num_examples: int) -> None:
        """Reject, at the client, more examples than ``max_examples``."""
        if num_examples > self.max_examples:
            raise ConfigError(
                "a client has more examples than strategy.secure_aggregation.max_examples="
                f"{self.max_examples}: set it higher"
            )

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
            timeout: seconds, of each of the four exchanges.
        """
        wire = SecAggGrid(grid, len(layout), timeout)
        nodes = {message.metadata.dst_node_id: message for message in messages.values()}
        try:
            mean, summed = sum_vectors(self._workflow(len(nodes)), wire, nodes, round)
            found = layout.unpack(mean, len(summed), self.step(len(nodes)))
        except (NoSumError, ValueError) as error:  # ValueError: a spoilt share
            told = {lost.metadata.src_node_id for lost in wire.errors}
            why = f"no secure sum: {error}"
            failed = [error_reply(message, why) for n, message in nodes.items() if n not in told]
            return Exchanged([*wire.errors, *failed], wire.bytes_down, wire.bytes_up)
        sent = {UPDATE: {**found.update, **found.buffers}, **found.payloads}
        records = {name: to_record(tensors) for name, tensors in sent.items()}  # serialised once
        # A client that is lost after the third exchange is in the sum nevertheless.
        replies = [error for error in wire.errors if error.metadata.src_node_id not in summed]
        for client, message in messages.items():
            if message.metadata.dst_node_id in summed:
                metrics = to_metrics({**found.metrics, "partition-id": client})
                replies.append(Message(RecordDict({**records, METRICS: metrics}), reply_to=message))
        return Exchanged(replies, wire.bytes_down, wire.bytes_up)

    def _workflow(self, size: int) -> SecAggPlusWorkflow:
        if size < _LEAST:
            raise NoSumError(f"the round has {size} clients, and needs {_LEAST}")
        return SecAggPlusWorkflow(
            self.num_shares if self.num_shares <= 1 else int(self.num_shares),
            self.reconstruction_threshold,
            max_weight=1.0,
            clipping_range=float(self.clipping_range),  # the clients' mod requires a float
            quantization_range=self.steps(size),
            modulus_range=_MODULUS,
        )

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
            context: of the ClientApp; its state holds the protocol's keys.
            train: called in the third exchange.
            layout: of the reply.
            seed: for random rounding; it is no secret.

        Raises:
            RefusedReplyError: for NaN or Inf, and for settings other than the recipe's.
        """
        self._check_setup(message.content.config_records[RECORD_KEY_CONFIGS])

        def train_and_pack(message: Message, context: Context) -> Message:
            del message.content.config_records[RECORD_KEY_CONFIGS]
            reply = train(message)
            return Message(fit_result([self._packed(reply, layout(reply))]), reply_to=message)

        copied = copy.copy(message)  # Flower's mod removes entries from the content
        asked = ConfigRecord({**message.content.config_records[RECORD_KEY_CONFIGS]})
        copied.content = RecordDict({**message.content, RECORD_KEY_CONFIGS: asked})
        trains = CONFIG in message.content.config_records
        with seeded_numpy(seed(message) if trains else None):
            answer = secaggplus_mod(copied, context, train_and_pack)
        configs = answer.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS in configs:  # numbers in [0, 2^32), which Flower sends as 64 bits
            masked = cast(list[bytes], configs[Key.MASKED_PARAMETERS])
            arrays = [bytes_to_ndarray(data) for data in masked]
            configs[Key.MASKED_PARAMETERS] = [
                ndarray_to_bytes(array.astype(np.uint32)) for array in arrays
            ]
        # leaves out the example count and the metrics that Flower's mod sends beside it
        return Message(RecordDict({RECORD_KEY_CONFIGS: configs}), reply_to=message)

    def _packed(self, reply: Reply, layout: Layout) -> Vector:
        self.check_client(reply.num_examples)
        for name, tensors in [(UPDATE, {**reply.update, **reply.buffers}), *reply.payloads.items()]:
            check_finite(name, tensors)
        share = float(np.mean(np.abs(layout.pack(reply)) > self.clipping_range))
        vector = layout.pack(replace(reply, metrics={**reply.metrics, CLIPPED: share}))
        if not np.isfinite(vector).all():
            raise RefusedReplyError("its metrics are NaN or Inf")
        return vector

    def _check_setup(self, configs: ConfigRecord) -> None:
        """Reject settings of the server that weaken the recipe's."""
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
