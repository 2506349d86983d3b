"""FederatedStrategy: the round, on Flower's Message API, that all methods share.

server                                                        client (one node)
sampler -> cohort
"params", "<payload>" of every ServerSide.broadcast, "config"  --->   local training
"update" (y_i - x), "<payload>" of every ClientSide.end, "metrics"  <---
validate, sort by client id -> transforms -> aggregator -> Delta -> server optimiser -> x;
then reduce() of every ServerSide; output -> what is evaluated and stored
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import TypedDict

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from common.errors import ConfigError, require_range, require_whole
from strategies.base import (
    STATE_LOST,
    Aggregator,
    ClientSampler,
    ClientSide,
    MeanAggregator,
    Observer,
    Output,
    RefusedReplyError,
    Reply,
    ReplyTransform,
    Schedule,
    ServerOptimizer,
    ServerSide,
    Tensors,
    check_sides,
)
from strategies.components import server_optimizers
from strategies.components.aggregators import WeightedMean
from strategies.components.model_outputs import Latest
from strategies.components.samplers import FixedSizeSampler
from strategies.components.schedules import Constant
from strategies.privacy.reply_vector import (
    Layout,
    per_example,
    require_private,
    require_sums,
    shapes_of,
)
from strategies.privacy.secure_aggregation import KEY, SecAggPlus
from strategies.round.records import (
    CONFIG,
    PARAMS,
    asked_by_message,
    checked_metrics,
    count_bytes,
    mean_metrics,
    mean_scores,
    parse_reply,
    personal_scores,
    scalars,
    sender,
    silent_for,
    to_metrics,
    to_record,
    to_tensors,
    valid_replies,
)
from strategies.round.registration import ClientAvailability, register_clients
from strategies.round.round_report import RoundReport, StrategyState
from strategies.round.server_network import GivesNetwork, Network
from strategies.round.server_step import ServerStep
from strategies.statistics.update_diagnostics import step_norm

_CLOCKS_SECONDS = 3600.0  # by how much a site's clock may go before the server's
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Slots(TypedDict, total=False):
    """What every method's strategy takes beside its own arguments: see FederatedStrategy."""

    aggregator: Aggregator
    server_optimizer: ServerOptimizer
    output: Output
    network: Network
    sampler: ClientSampler
    transforms: Sequence[ReplyTransform]
    observers: Sequence[Observer]
    schedule: Schedule
    local_lr: float
    buffers: Collection[str]
    num_clients: int
    min_clients: int | None
    min_replies: int
    max_failed_rounds: int
    fingerprint: Mapping[str, str]
    evaluate_on_clients: bool
    connect_timeout_seconds: float
    secure_aggregation: SecAggPlus | None


OnRound = Callable[[RoundReport, ArrayRecord], bool]


class FederatedStrategy(Strategy):
    """A method, assembled from sides and slots. FedAvg when none is given.

    Args:
        client_sides: the client halves, by name; here only to be checked against the server's.
        server_sides: the server halves, by name.
        aggregator: (x, replies) -> Delta; mean weighted by example counts by default.
        server_optimizer: x, Delta -> x; SGD with eta_g = 1 by default.
        output: (x, Delta, new x, replies) -> the model that a round gives out; the new x by
            default.
        network: the task's, for the slots that run it at the server.
        sampler: chooses the cohort over client ids; everybody by default.
        transforms: (x, replies) -> replies, applied in order before aggregation.
        observers: (x, replies, cohort) -> nothing: they see every round's replies as they came.
        schedule: factor of ``local_lr`` per round; constant by default.
        local_lr: eta_l, sent to the clients as "lr".
        buffers: names in the arrays that are not trained (BatchNorm statistics): always the
            example-weighted mean, never seen by sides, aggregator or server optimiser.
        num_clients: N; 0 takes as many clients as there are nodes.
        min_clients: so many of the N are enough for round 1 when ``connect_timeout_seconds`` are
            over; None: all. The others may join later.
        min_replies: with fewer valid replies a round leaves the model as it was; a round waits
            until so many clients are connected.
        max_failed_rounds: that many such rounds in a row end the run with an error.
        fingerprint: hashes that every node must share with the server.
        evaluate_on_clients: evaluate the output at all clients, in a second exchange a round.
        connect_timeout_seconds: how long to wait for the nodes before round 1, and before any
            round for ``min_replies`` of them.
        secure_aggregation: the server learns the sum of a round's replies and no single one.
        allow_stacked_corrections: permit several sides that edit gradients.

    Raises:
        ConfigError: if the sides do not fit each other, or a part reads single replies where there
            are none.
    """

    def __init__(
        self,
        *,
        client_sides: Mapping[str, ClientSide] | None = None,
        server_sides: Mapping[str, ServerSide] | None = None,
        aggregator: Aggregator | None = None,
        server_optimizer: ServerOptimizer | None = None,
        output: Output | None = None,
        network: Network | None = None,
        sampler: ClientSampler | None = None,
        transforms: Sequence[ReplyTransform] = (),
        observers: Sequence[Observer] = (),
        schedule: Schedule | None = None,
        local_lr: float = 0.05,
        buffers: Collection[str] = (),
        num_clients: int = 0,
        min_clients: int | None = None,
        min_replies: int = 1,
        max_failed_rounds: int = 3,
        fingerprint: Mapping[str, str] | None = None,
        evaluate_on_clients: bool = False,
        connect_timeout_seconds: float = 600.0,
        secure_aggregation: SecAggPlus | None = None,
        allow_stacked_corrections: bool = False,
    ) -> None:
        self.client_sides = dict(client_sides or {})
        self.server_sides = dict(server_sides or {})
        check_sides(
            self.client_sides,
            self.server_sides,
            allow_stacked_corrections=allow_stacked_corrections,
        )
        self.server_step = ServerStep(
            self.server_sides,
            aggregator or WeightedMean(),
            server_optimizer or server_optimizers.SGD(),
            transforms,
            buffers,
            output or Latest(),
            network,
            observers,
        )
        self.secure_aggregation = secure_aggregation
        self._require_sums(evaluate_on_clients)
        self.sampler = sampler or FixedSizeSampler()
        self.schedule = schedule or Constant()
        self.local_lr = require_range("local.lr", local_lr, open_low=True)
        self.num_clients = num_clients
        if min_clients is not None:
            require_whole("runtime.min_clients", min_clients, low=1)
        self.min_clients = min_clients
        self.min_replies = require_whole("min_replies", min_replies, low=1)
        self.max_failed_rounds = require_whole("max_failed_rounds", max_failed_rounds, low=1)
        self.fingerprint = dict(fingerprint or {})
        if evaluate_on_clients and isinstance(output, GivesNetwork):
            raise ConfigError(
                f"evaluation.clients=true, but the output {type(output).__name__} gives out "
                "another network than the clients': set it to false"
            )
        self.evaluate_on_clients = evaluate_on_clients
        self.connect_timeout_seconds = connect_timeout_seconds
        self.state = StrategyState()
        self.durable: dict[int, int] = {}
        self.num_rounds = 0
        self._availability: ClientAvailability | None = None
        self._sent: list[Metadata] = []
        self._timeout_seconds = 0.0
        self._params: Tensors = {}
        self._report = RoundReport(round=0)

    # ---- Flower's entry point ----------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        on_round: OnRound | None = None,
    ) -> Result:
        """Run rounds ``state.round + 1`` to ``num_rounds``; Flower's signature plus ``on_round``.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: x, the shared tensors by name (after ``restore``: those of its round).
            num_rounds: the last round.
            timeout: seconds to wait for a round's replies.
            train_config: further entries of the clients' config.
            evaluate_config: the same for evaluation at the clients.
            evaluate_fn: evaluates the output at the server; returns None for a round to skip.
            on_round: called with each finished round and its x; True ends the run.

        Returns:
            the metrics by round and, as ``arrays``, the last output: that of the last round that
            had enough valid replies.
        """
        self.num_rounds, self._timeout_seconds = num_rounds, timeout
        self.server_step.init(to_tensors(initial_arrays), self.state.tensors)
        wait = self.connect_timeout_seconds
        registry = register_clients(
            grid, self.num_clients, self.fingerprint, wait, self.min_clients
        )
        self._require_reachable(len(registry))
        if self.secure_aggregation is not None:
            self.secure_aggregation.check(len(registry))
            self._layout(to_tensors(initial_arrays))
        self._availability = ClientAvailability(registry, self.fingerprint, self.min_replies, wait)
        self.summary()
        result, arrays = Result(), initial_arrays
        result.arrays = self._output_model(arrays)
        first = self.state.round + 1
        for round in range(0 if first == 1 else first, num_rounds + 1):
            if round > 0:
                arrays = self._train_round(
                    grid, round, arrays, timeout, train_config or ConfigRecord(), result
                )
                result.arrays = self._output_model(arrays)
                self._evaluate_at_clients(
                    grid, round, result.arrays, timeout, evaluate_config or ConfigRecord(), result
                )
            evaluation = evaluate_fn(round, result.arrays) if evaluate_fn else None
            if evaluation is not None:
                result.evaluate_metrics_serverapp[round] = evaluation
                self._report.evaluation = scalars(evaluation)
            if on_round is not None and on_round(self._report, arrays):
                log(INFO, "Stopped after round %s: the target is reached", round)
                break
        return result

    def restore(self, state: StrategyState) -> None:
        """Go on after ``state.round`` when ``start`` is called next."""
        self.state = state
        self.durable = dict(state.committed)

    def snapshot(self) -> StrategyState:
        """Return the state to ``restore``, together with the params of the last finished round."""
        return replace(
            self.state,
            committed=dict(self.state.committed),
            restarted=dict(self.state.restarted),
            personal=dict(self.state.personal),
            tensors=self.server_step.state_dict(),
        )

    def mark_durable(self) -> None:
        """Say that the last snapshot is on disk: clients may drop older states."""
        self.durable = dict(self.state.committed)

    def network_of(self, tensors: Tensors) -> nn.Module:
        """Return the network of what was given out, where that is not the task's.

        Raises:
            ValueError: if the output gives out no other.
        """
        output = self.server_step.output
        if not isinstance(output, GivesNetwork):
            raise ValueError(f"{type(output).__name__} gives out the task's own network")
        return output.network(tensors)

    @property
    def availability(self) -> ClientAvailability:
        """Who takes part, and who of them is connected.

        Raises:
            RuntimeError: before ``start``, which makes the roll call.
        """
        if self._availability is None:
            raise RuntimeError("the roll call comes first: call start(), which makes it")
        return self._availability

    def personal_scores(self) -> dict[str, float]:
        """Return the mean scores of the clients' own models, over all that have trained so far."""
        return mean_scores(self.state.personal.values())

    # ---- Flower's four hooks -----------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the cohort and write its messages."""
        present = self.availability.present
        cohort = [present[i] for i in self.sampler.sample(server_round, len(present))]
        self._params = to_tensors(arrays)
        # What many clients get is serialised once. Held beside its record, a payload keeps its id.
        records: dict[int, tuple[Tensors, ArrayRecord]] = {}
        messages = []
        for client in cohort:
            content = RecordDict({PARAMS: arrays})
            for name, tensors in self.server_step.broadcast(client).items():
                if id(tensors) not in records:
                    records[id(tensors)] = (tensors, to_record(tensors))
                content[name] = records[id(tensors)][1]
            content[CONFIG] = self._config(server_round, client, config)
            messages.append(self._message(content, MessageType.TRAIN, client, server_round))
        self._sent = [message.metadata for message in messages]
        self._report = RoundReport(
            round=server_round,
            lr=self._lr(server_round),
            clients=cohort,
            absent=sorted(set(range(len(self.availability.registry))) - set(present)),
            bytes_down=sum(count_bytes(message.content) for message in messages),
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate the replies and take the step; (None, None) leaves the model as it was."""
        valid, failures, bytes_up = valid_replies(
            replies,
            {self._node_of(client): client for client in self._report.clients},
            self._parse,
            asked_by_message(self._sent),
            self._timeout_seconds,
        )
        self._report.clients = [reply.client_id for reply in valid]
        self._report.failures, self._report.bytes_up = failures, bytes_up
        for failure in failures:
            log(WARNING, "round %s: %s", server_round, failure)
        self.state.round = server_round
        if len(valid) < self.min_replies:
            self._count_failed_round(server_round, len(valid), failures)
            return None, None
        self.state.failed_rounds = 0
        self.state.committed |= {reply.client_id: server_round for reply in valid}
        began = time.perf_counter()
        params = self.server_step(
            self._params, valid, server_round, len(self.availability.registry)
        )
        self._report.server_seconds = time.perf_counter() - began
        self._restart_if_lost(valid, params, server_round)
        self.state.personal |= {r.client_id: personal_scores(r.metrics) for r in valid}
        means = mean_metrics([reply.metrics for reply in valid])
        metrics = means | self.personal_scores() | self.server_step.metrics()
        self._report.metrics = metrics
        return to_record(params), to_metrics(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Write a message to every client, if clients evaluate in an exchange of their own."""
        if not self.evaluate_on_clients:
            return []
        return list(self._to_all(arrays, config, MessageType.EVALUATE, server_round).values())

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the example-weighted mean of the clients' metrics; bad replies are left out."""
        rows = []
        for message in replies:
            node = message.metadata.src_node_id
            if message.has_error():
                log(WARNING, "evaluation at node %s: %s", node, message.error.reason)
                continue
            try:
                rows.append(checked_metrics(message.content, {"partition-id", "num-examples"}))
            except RefusedReplyError as refusal:
                log(WARNING, "evaluation at node %s: %s", node, refusal)
        if not rows:
            return None
        rows.sort(key=lambda row: row["partition-id"])
        self._report.client_evaluation = mean_metrics(rows)
        return to_metrics(self._report.client_evaluation)

    def summary(self) -> None:
        """Log the parts."""
        parts = {
            "client sides": sorted(self.client_sides),
            "server sides": sorted(self.server_sides),
            "aggregator": type(self.server_step.aggregator).__name__,
            "server optimiser": type(self.server_step.optimizer).__name__,
            "output": type(self.server_step.output).__name__,
            "sampler": type(self.sampler).__name__,
        }
        if self.secure_aggregation is not None:
            parts["secure aggregation"] = type(self.secure_aggregation).__name__
        log(INFO, "%s: %s", type(self).__name__, ", ".join(f"{k} {v}" for k, v in parts.items()))

    # ---- after the rounds --------------------------------------------------------------------

    def ask_clients(
        self, grid: Grid, message_type: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> dict[int, RecordDict]:
        """Send a model to all clients that are there, and return what they answer, by client.

        Who answers with an error, or not at all, is named in the log and left out.

        Args:
            grid: Flower's connection to the nodes.
            message_type: of the messages, such as "query.ACTION".
            arrays: the shared tensors by name.
            config: further entries of the clients' config.
        """
        self.availability.refresh(grid)
        messages = self._to_all(arrays, config, message_type, self.num_rounds)
        sent = [message.metadata for message in messages.values()]
        replies = grid.send_and_receive(list(messages.values()), timeout=self._timeout_seconds)
        by_node = {sender(reply, asked_by_message(sent)): reply for reply in replies}
        found = {}
        for client in sorted(messages):
            reply = by_node.get(self._node_of(client))
            if reply is not None and reply.has_content():
                found[client] = reply.content
            else:
                why = silent_for(self._timeout_seconds) if reply is None else reply.error.reason
                log(WARNING, "%s of client %s: %s", message_type, client, why)
        return found

    def _to_all(
        self, arrays: ArrayRecord, config: ConfigRecord, message_type: str, round: int
    ) -> dict[int, Message]:
        """Return a message with a model to every client that is there."""
        return {
            client: self._message(
                RecordDict({PARAMS: arrays, CONFIG: self._config(round, client, config)}),
                message_type,
                client,
                round,
            )
            for client in self.availability.present
        }

    # ---- one round, in pieces ----------------------------------------------------------------

    def _restart_if_lost(self, replies: Sequence[Reply], params: Tensors, round: int) -> None:
        """Start the parts again whose state is made of all clients', where one has lost its."""
        lost = [reply.client_id for reply in replies if reply.metrics.get(STATE_LOST)]
        if not lost:
            return
        keys = self.server_step.restart_coupled(params)
        self.state.restarted |= dict.fromkeys(keys, round)
        log(
            WARNING,
            "round %s: clients %s have lost their state of earlier rounds%s",
            round,
            lost,
            f": all clients start again with {', '.join(sorted(keys))}" if keys else "",
        )

    def _dropped_of(self, client: int) -> str:
        """Return the keys of its state that a client is to drop: it is older than their start."""
        version = self.state.committed.get(client, 0)
        keys = (key for key, round in self.state.restarted.items() if version <= round)
        return ",".join(sorted(keys))

    def _require_reachable(self, num_clients: int) -> None:
        """Refuse to wait for more replies than a round can have."""
        sampler = self.sampler
        most = sampler.size(num_clients) if isinstance(sampler, FixedSizeSampler) else num_clients
        if self.min_replies > most:
            raise ConfigError(
                f"min_replies={self.min_replies}, but of the {num_clients} clients at most {most} "
                f"take part in a round (participation): set min_replies to {most} or less"
            )

    def _lr(self, round: int) -> float:
        return self.local_lr * self.schedule(round, self.num_rounds)

    def _config(self, round: int, client: int, config: ConfigRecord) -> ConfigRecord:
        return ConfigRecord(
            {
                **config,
                "round": round,
                "num-rounds": self.num_rounds,
                "lr": self._lr(round),
                "experiment": self.state.experiment,
                "state-round": self.state.committed.get(client, 0),
                "state-keep": self.durable.get(client, 0),
                "state-dropped": self._dropped_of(client),
                "timeout-seconds": self._timeout_seconds,
            }
        )

    def _train_round(
        self,
        grid: Grid,
        round: int,
        arrays: ArrayRecord,
        timeout: float,
        config: ConfigRecord,
        result: Result,
    ) -> ArrayRecord:
        self.availability.refresh(grid)
        began = time.perf_counter()
        messages = self.configure_train(round, arrays, config, grid)
        if self.secure_aggregation is None:
            replies = grid.send_and_receive(messages, timeout=timeout)
            new_arrays, metrics = self.aggregate_train(round, replies)
        else:
            exchanged = self.secure_aggregation.exchange(
                grid,
                dict(zip(self._report.clients, messages, strict=True)),
                self._layout(self._params),
                round,
                timeout,
            )
            new_arrays, metrics = self.aggregate_train(round, exchanged.replies)
            self._report.bytes_up = exchanged.bytes_up
            self._report.bytes_down = exchanged.bytes_down
        self._report.seconds = time.perf_counter() - began
        if new_arrays is None or metrics is None:
            return arrays
        result.train_metrics_clientapp[round] = metrics
        return new_arrays

    def _node_of(self, client: int) -> int:
        return self.availability.registry.nodes[client]

    def _message(self, content: RecordDict, message_type: str, client: int, round: int) -> Message:
        """Return a message that no node starts on long after the round has ended."""
        return Message(
            content=content,
            message_type=message_type,
            dst_node_id=self._node_of(client),
            ttl=self._timeout_seconds + _CLOCKS_SECONDS,
            group_id=str(round),  # nodes log it
        )

    def _output_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what the last round gave out, where ``arrays`` is x after it."""
        output_model = self.server_step.output_model
        return arrays if output_model is None else to_record(output_model)

    def _evaluate_at_clients(
        self,
        grid: Grid,
        round: int,
        arrays: ArrayRecord,
        timeout: float,
        config: ConfigRecord,
        result: Result,
    ) -> None:
        messages = list(self.configure_evaluate(round, arrays, config, grid))
        if messages:
            metrics = self.aggregate_evaluate(
                round, grid.send_and_receive(messages, timeout=timeout)
            )
            if metrics is not None:
                result.evaluate_metrics_clientapp[round] = metrics

    def _payload_names(self) -> set[str]:
        return {name for side in self.client_sides.values() for name in side.sends}

    def _require_sums(self, evaluate_on_clients: bool) -> None:
        """Refuse parts that read single replies where the server has but their sum."""
        require_private(self.client_sides)
        step = self.server_step
        averaged = any(side.averages for side in step.sides.values())
        summed = self.secure_aggregation is not None
        if not averaged and not summed:
            return
        weighting = require_sums(
            KEY if summed else "strategy/differential_privacy",
            self.client_sides,
            step.sides,
            step.aggregator,
            step.transforms,
            step.output,
            step.observers,
            summed=summed,
        )
        if averaged and weighting != "clients":
            raise ConfigError(
                f"strategy/differential_privacy needs every client to weigh the same, and "
                f"{type(step.aggregator).__name__} weighs them by their {weighting}: set "
                "strategy/aggregator=uniform_mean"
            )
        step.diagnose = step_norm
        if evaluate_on_clients and summed:
            raise ConfigError(
                f"evaluation.clients=true asks each client for its loss and accuracy, and {KEY} "
                "keeps what is a single client's from the server: set one of them to false, none"
            )

    def _layout(self, tensors: Tensors) -> Layout:
        """Return the layout of the replies to these tensors."""
        step, expected = self.server_step, self.server_step.expected()
        shapes, names = shapes_of(tensors), self._payload_names()
        if unknown := sorted(names - expected.keys()):
            raise ConfigError(
                f"the payloads {unknown} have no shape that the server knows before round 1, so "
                f"that they have no place in a sum: set {KEY}=none, or choose another method"
            )
        aggregator = step.aggregator
        assert self.secure_aggregation is not None
        assert isinstance(aggregator, MeanAggregator)
        return Layout(
            update={name: shape for name, shape in shapes.items() if name not in step.buffers},
            buffers={name: shape for name, shape in shapes.items() if name in step.buffers},
            payloads={name: expected[name] for name in names},
            per_example=per_example(self.client_sides),
            weighting=aggregator.weighting,
            max_examples=self.secure_aggregation.max_examples,
        )

    def _parse(self, message: Message, client: int) -> Reply:
        reply = parse_reply(
            message,
            client,
            self._params,
            self.server_step.buffers,
            self._payload_names(),
            self.server_step.expected(),
        )
        self.server_step.check(reply)
        return replace(reply, per_example=per_example(self.client_sides))

    def _count_failed_round(self, round: int, num_valid: int, failures: Sequence[str]) -> None:
        self.state.failed_rounds += 1
        log(
            WARNING,
            "round %s: %s valid replies, min_replies=%s: the model stays as it was",
            round,
            num_valid,
            self.min_replies,
        )
        if self.state.failed_rounds >= self.max_failed_rounds:
            raise RuntimeError(
                f"{self.state.failed_rounds} rounds in a row had fewer than min_replies="
                f"{self.min_replies} valid replies (max_failed_rounds={self.max_failed_rounds}); "
                f"the last failures: {'; '.join(failures[:5])}"
            )
