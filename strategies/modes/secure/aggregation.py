"""Secure aggregation of a round's replies with Flower's SecAgg+.

Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure single-server aggregation with (poly)logarithmic
overhead. CCS 2020. https://eprint.iacr.org/2020/704

The client half is Flower's ``secaggplus_mod``; the server half, which survives bad clients, is
strategies/modes/secure/workflow.py. The five exchanges are:

    setup                    every client makes two key pairs; the server distributes public keys
    share keys               it shares (Shamir) a mask's seed and a secret key among its neighbours
    check shares             it says whose shares it cannot read (see shares.py)
    collect masked vectors   it trains, and sends  v_i + mask(b_i) +- mask(pairs)  mod 2^32
    unmask                   the neighbours send the shares that remove the masks from the sum

v_i is the client's reply as one vector (strategies/modes/secure/reply_vector.py). The mean of all
vectors comes back as the reply of each client. If a client sent a wrong vector, the sum shows it,
and is rejected. Replies travel as numbers of 32 bits instead of 64, and without the example counts
that Flower's mod sends unmasked.

A client refuses to send NaN or Inf, because nobody can see them behind masks. It cuts off numbers
beyond ``clipping_range``; ``clipped_share`` in metrics.jsonl is their share, and the server warns
of more than 1 %. It leaves out metrics that a client has cut off. It rounds numbers at
random, without bias, to multiples of 2 clipping_range / quantization_range.

docs/privacy.md describes the security: it holds against a server that follows the protocol and
reads along, not against a malicious one, and Flower draws masks from seeds of at most 32 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Annotated, cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.logger import log
from flwr.serverapp import Grid
from pydantic import AfterValidator, Field

from fedhet.common.configured import Option
from fedhet.common.errors import ConfigError
from fedhet.common.flower.secagg import (
    RECORD_KEY_CONFIGS,
    Key,
    Stage,
    fitres_to_recorddict,
    secaggplus_mod,
)
from fedhet.common.kinds import Count, Says, ShareAboveZero
from fedhet.strategies.base import RefusedReplyError, Reply
from fedhet.strategies.modes.private.gaussian_mechanism import seeded_numpy
from fedhet.strategies.modes.secure.exchanges import SecAggWire, error_reply
from fedhet.strategies.modes.secure.reply_vector import CLIPPED, Layout, Vector
from fedhet.strategies.modes.secure.shares import (
    CHECK_SHARES,
    PAIRWISE_SEEDS,
    add_hashes,
    check_shares,
    reveal_seeds,
    take_ciphertexts,
)
from fedhet.strategies.modes.secure.workflow import (
    LEAST,
    NoSumError,
    SecureSum,
    SpoiltSumError,
)
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.round.training_round import RoundReplies, TrainingRound
from fedhet.strategies.wire.records import METRICS, PARAMS, UPDATE, to_metrics, to_record
from fedhet.strategies.wire.tensor_decoder import check_finite

KEY = "strategy/secure_aggregation"
_MODULUS = 1 << 32  # of Flower's masks
_FINEST = 30  # bits: Flower rounds to 32-bit integers
_MUCH = 0.01  # of the numbers that are cut off, of which the server warns


@dataclass(frozen=True)
class SecureReplies(RoundReplies):
    """The mean of all replies in place of each, and an error in place of each lost reply."""

    failures: Sequence[str]  # why a client failed whose vector was in the sum already
    bytes_down: int  # of arrays and of the protocol, sent
    bytes_up: int  # the same, received
    spoilt: Sequence[int] = ()  # clients whose vectors add up to something else than replies do

    def complete(self, report: RoundReport) -> None:
        """Add the bytes of all exchanges, and the failures."""
        report.bytes_down, report.bytes_up = self.bytes_down, self.bytes_up
        report.failures = [*report.failures, *self.failures]


def _odd(number: int) -> int:
    if number % 2 != 1:
        raise ValueError
    return number


Odd = Annotated[int, Field(ge=LEAST), AfterValidator(_odd), Says(f"an odd number from {LEAST} on")]
Majority = Annotated[float, Field(gt=0.5, le=1)]
AtLeastOne = Annotated[float, Field(ge=1)]
Steps = Annotated[int, Field(ge=2, le=1 << _FINEST)]


class SecAggPlus(Option):
    """SecAgg+ with Flower's settings; ``send`` is the server half, ``reply`` the client half."""

    group = "strategy/secure_aggregation"
    option = "secagg_plus"

    num_shares: ShareAboveZero | Odd = 1.0
    """how many clients of a round share a key, its owner included: a share of them, or an odd
    number (the paper's neighbours)"""
    reconstruction_threshold: Majority = 0.67
    """the share of those clients that is needed to remove a lost client's masks; with fewer the
    round fails"""
    clipping_range: AtLeastOne = 8.0  # a vector's first number is 1: it is a mean of vectors
    """R: clients cut off numbers at -R and R"""
    quantization_range: Steps | None = None
    """steps between -R and R; null: as many as 32 bits allow for a round's sum"""
    max_examples: Count = 10_000
    """the most examples that a client may have"""
    find_spoilers: bool = True
    """where a client's masked vector is noise, so that there is no sum, the next rounds leave half
    of the suspects out, until it is found, and go on without it; false: such rounds fail"""

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
        """Return the step that a client's numbers are rounded to, in a sum of ``size`` clients.

        Raises:
            ConfigError: if the sum has no room for the steps.
        """
        return 2 * self.clipping_range / self.steps(size)

    def check(self, num_clients: int, most: int) -> None:
        """Reject rounds of at most ``most`` of the clients, if that is too few to hide one in a sum
        (or too many for its 32 bits).
        """
        if most < LEAST:
            raise ConfigError(
                f"{KEY}: a secure sum needs at least {LEAST} clients, and of clients={num_clients} "
                f"at most {most} take part in a round (participation): set clients or "
                f"participation higher, or {KEY}=none"
            )
        if self.num_shares > most:
            raise ConfigError(
                f"strategy.secure_aggregation.num_shares={self.num_shares}: a round has at most "
                f"{most} clients (participation): set it to an odd number up to that, or to a share"
            )
        self.steps(most)
        log(INFO, "%s", self._limits())

    def _limits(self) -> str:
        """Return what a run does not survive, or does not notice."""
        searched = (
            "the next rounds leave suspects out until they have found it, and the run goes on "
            "without it"
            if self.find_spoilers
            else "all rounds with it fail (strategy.secure_aggregation.find_spoilers=true finds it)"
        )
        return (
            "The server sees sums alone (strategy/secure_aggregation). It does not notice a client "
            f"that sends wrong numbers within +-{self.clipping_range:g}. If one sends noise, the "
            f"round fails, and nobody can tell which client it was; {searched}. A round also fails "
            f"if fewer than {self.reconstruction_threshold:.0%} of its clients stay to its end, or "
            f"fewer than {LEAST}"
        )

    def check_client(self, num_examples: int) -> None:
        """Reject, at the client, more examples than ``max_examples``."""
        if num_examples > self.max_examples:
            raise ConfigError(
                "a client has more examples than strategy.secure_aggregation.max_examples="
                f"{self.max_examples}: set it higher"
            )

    def send(self, grid: Grid, training: TrainingRound, layout: Layout) -> SecureReplies:
        """Send a round's messages and return the mean of the replies in place of each."""
        wire = SecAggWire(grid, training.timeout, training.number)
        messages = training.messages
        for client, message in messages.items():  # never sent as they are, so no grid gives ids
            message.metadata.__dict__["_message_id"] = f"train client {client}"
        nodes = {message.metadata.dst_node_id: message for message in messages.values()}
        try:
            secure = SecureSum(wire, self._setup(len(nodes)), len(layout))
            mean, summed = secure.run({node: message.content for node, message in nodes.items()})
            try:
                found = layout.unpack(mean, len(summed), self.step(len(nodes)))
            except ValueError as error:
                raise SpoiltSumError(str(error), summed) from None
        except NoSumError as error:
            why, wire_bytes = f"no secure sum: {error}", (wire.bytes_down, wire.bytes_up)
            failed = [error_reply(m, wire.lost.get(n, why)) for n, m in nodes.items()]
            inside = error.summed if isinstance(error, SpoiltSumError) else ()
            spoilt = [c for c, m in messages.items() if m.metadata.dst_node_id in inside]
            return SecureReplies(training, failed, [], *wire_bytes, spoilt)
        self._warn_of_cuts(training.number, found, layout.cut_metrics(mean, len(summed)))
        sent = {UPDATE: {**found.update, **found.buffers}, **found.payloads}
        records = {name: to_record(tensors) for name, tensors in sent.items()}  # serialised once
        replies, failures = [], []
        for client, message in messages.items():
            node = message.metadata.dst_node_id
            if node not in summed:
                replies.append(error_reply(message, wire.lost[node]))
                continue
            metrics = to_metrics({**found.metrics, "partition-id": client})
            replies.append(Message(RecordDict({**records, METRICS: metrics}), reply_to=message))
            if node in wire.lost:
                failures.append(f"client {client}, after its update was summed: {wire.lost[node]}")
                log(WARNING, "round %s: %s", training.number, failures[-1])
        return SecureReplies(training, replies, failures, wire.bytes_down, wire.bytes_up)

    def _warn_of_cuts(self, round: int, mean: Reply, metrics: Sequence[str]) -> None:
        share = mean.metrics.get(CLIPPED, 0.0)
        if share <= _MUCH and not metrics:
            return
        text = "round %s: %.2g %% of the numbers that the clients sent were cut off at %s%s"
        without = f"; {', '.join(metrics)} is left out of the row" if metrics else ""
        key = f"strategy.secure_aggregation.clipping_range={self.clipping_range:g}"
        more = f"{without}: set it higher, or the step size or the inputs lower"
        log(WARNING, text, round, 100 * share, key, more)

    def _setup(self, size: int) -> ConfigRecord:
        """Return Flower's settings for a round of ``size`` clients."""
        if size < LEAST:
            raise NoSumError(f"the round has {size} clients, and needs {LEAST}")
        shares = int(self.num_shares)
        if self.num_shares <= 1:
            shares = round(self.num_shares * size)
            shares += shares < size and shares % 2 == 0  # as many on both sides of the ring
            shares = size if shares < LEAST else shares
        return ConfigRecord(
            {
                Key.SAMPLE_NUMBER: size,
                Key.SHARE_NUMBER: shares,
                Key.THRESHOLD: self._threshold(shares),
                Key.CLIPPING_RANGE: float(self.clipping_range),  # the mod requires a float
                Key.TARGET_RANGE: self.steps(size),
                Key.MOD_RANGE: _MODULUS,
                Key.MAX_WEIGHT: 1.0,
            }
        )

    def _threshold(self, shares: int) -> int:
        """Return how many shares give a secret: more than half, so that no two groups have it."""
        return max(shares // 2 + 1, round(self.reconstruction_threshold * shares))

    def reply(
        self,
        message: Message,
        context: Context,
        train: Callable[[Message], Reply],
        layout: Callable[[Reply], Layout],
        seed: Callable[[Message], np.random.SeedSequence],
    ) -> Message:
        """Return the client's answer in any of the exchanges, by Flower's mod.

        Args:
            message: of the server.
            context: of the ClientApp; its state holds the protocol's keys.
            train: called when the server asks for the masked vector.
            layout: of the reply.
            seed: for random rounding; it is no secret.

        Raises:
            RefusedReplyError: for NaN or Inf, for settings other than the recipe's, and for
                a question that would give away too much.
        """
        told = message.content.config_records[RECORD_KEY_CONFIGS]
        self._check_setup(told)
        for stage, answer_of in ((CHECK_SHARES, check_shares), (PAIRWISE_SEEDS, reveal_seeds)):
            if told[Key.STAGE] == stage:
                answered = answer_of(told, context)
                return Message(RecordDict({RECORD_KEY_CONFIGS: answered}), reply_to=message)

        def train_and_pack(message: Message, context: Context) -> Message:
            del message.content.config_records[RECORD_KEY_CONFIGS]
            reply = train(message)
            vector = ndarrays_to_parameters([self._packed(reply, layout(reply))])
            result = fitres_to_recorddict(FitRes(Status(Code.OK, ""), vector, 1, {}), False)
            return Message(result, reply_to=message)

        copied = copy.copy(message)  # Flower's mod removes entries from the content
        asked = ConfigRecord({**told})
        if told[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS:
            take_ciphertexts(asked, context)
        copied.content = RecordDict({**message.content, RECORD_KEY_CONFIGS: asked})
        trains = PARAMS in message.content
        with seeded_numpy(seed(message) if trains else None):
            answer = secaggplus_mod(copied, context, train_and_pack)
        configs = answer.content.config_records[RECORD_KEY_CONFIGS]
        if told[Key.STAGE] == Stage.SHARE_KEYS:
            add_hashes(configs, context)
        if Key.MASKED_PARAMETERS in configs:  # numbers in [0, 2^32), which Flower sends as 64 bits
            masked = cast(list[bytes], configs[Key.MASKED_PARAMETERS])
            numbers = np.concatenate([bytes_to_ndarray(data) for data in masked])
            configs[Key.MASKED_PARAMETERS] = numbers.astype("<u4").tobytes()
        # leaves out the example count and the metrics that Flower's mod sends beside it
        return Message(RecordDict({RECORD_KEY_CONFIGS: configs}), reply_to=message)

    def _packed(self, reply: Reply, layout: Layout) -> Vector:
        self.check_client(reply.num_examples)
        for name, tensors in [(UPDATE, {**reply.update, **reply.buffers}), *reply.payloads.items()]:
            check_finite(name, tensors)
        limit = self.clipping_range
        if (lr := reply.lr_sum / max(reply.num_steps, 1)) > limit:
            raise RefusedReplyError(
                f"its step size is {lr:g}: strategy.secure_aggregation.clipping_range={limit:g} "
                "cuts it off; set that higher"
            )
        share = float(np.mean(np.abs(layout.pack(reply)) > limit))
        cut = layout.too_large(reply, limit)
        vector = layout.pack(replace(reply, metrics={**reply.metrics, CLIPPED: share}), cut)
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
            Key.THRESHOLD: self._threshold(shares),
        }
        wrong = sorted(name for name, value in agreed.items() if configs[name] != value)
        if wrong or size < LEAST or shares < least:
            raise RefusedReplyError(
                f"the server's settings of SecAgg+ are not the recipe's: {wrong or dict(configs)}"
            )
