"""FederatedStrategy: the round on Flower's Message API that all methods share.

server                                                        client (one node)
sampler -> cohort
"params", "<payload>" of every ServerSide.broadcast, "config"  --->   local training
"update" (y_i - x), "<payload>" of every ClientSide.end, "metrics"  <---
validate, sort by client id -> transforms -> aggregator -> Delta -> server optimiser -> x;
then reduce() of every ServerSide; output -> the model that is evaluated and stored

With ``initial_model`` a client without a state also gets "kept", what its own tensors begin as.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import STATE_LOST, Reply, Tensors
from fedhet.strategies.components import server_optimizers
from fedhet.strategies.components.aggregators import WeightedMean
from fedhet.strategies.components.model_outputs import Latest
from fedhet.strategies.components.samplers import FixedSizeSampler, most_clients
from fedhet.strategies.modes.checks import check_privacy, reply_layout
from fedhet.strategies.modes.robust.checks import check_robust
from fedhet.strategies.modes.round_clients import check_buffer, round_clients
from fedhet.strategies.modes.secure.reply_vector import require_no_buffers
from fedhet.strategies.modes.secure.workflow import LEAST
from fedhet.strategies.modes.simulated_clients import SimulatedClients
from fedhet.strategies.parts import Parts, Setup
from fedhet.strategies.round.checks import (
    check_aggregation,
    check_downlink,
    check_output,
    check_sides,
    reading_models,
)
from fedhet.strategies.round.cohort import Exchange
from fedhet.strategies.round.registration import (
    ClientAvailability,
    register_clients,
    valid_evaluations,
)
from fedhet.strategies.round.round_report import RoundReport, StrategyState
from fedhet.strategies.round.rules import Rules
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.round.training_round import RoundReplies, TrainingRound, send_round
from fedhet.strategies.wire.compressed_records import Downlink, compressible
from fedhet.strategies.wire.compression import Compression
from fedhet.strategies.wire.message_sizes import MessageSizes
from fedhet.strategies.wire.messages import (
    NUM_ROUNDS,
    TIMEOUT,
    MessageWriter,
    exchange,
    timeout_of,
)
from fedhet.strategies.wire.records import (
    KEPT,
    mean_metrics,
    mean_scores,
    personal_scores,
    scalars,
    to_metrics,
    to_record,
    to_tensors,
    with_senders,
)

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
OnRound = Callable[[RoundReport, ArrayRecord], bool]


class FederatedStrategy(Strategy):
    """The rounds of a method, from its parts; FedAvg by default.

    Args:
        parts: of the method.
        setup: of the run.
    """

    def __init__(self, parts: Parts | None = None, setup: Setup | None = None) -> None:
        parts, self.setup = parts or Parts(), setup or Setup()
        setup = self.setup
        self.client_sides = dict(parts.client_sides)
        self.server_sides = dict(parts.server_sides)
        check_sides(
            self.client_sides, self.server_sides, allow_stacked=setup.allow_stacked_corrections
        )
        self.server_step = ServerStep(
            self.server_sides,
            parts.aggregator or WeightedMean(),
            parts.server_optimizer or server_optimizers.SGD(setup.server_lr),
            list(parts.transforms.values()),
            setup.buffers,
            parts.output or Latest(),
            setup.server_model,
            setup.observers,
        )
        step = self.server_step
        check_aggregation(
            self.client_sides, step.sides, step.aggregator, step.optimizer, step.transforms
        )
        self.client_metrics = setup.client_metrics
        self.compression = parts.compression or Compression()
        self.secure_aggregation = parts.secure_aggregation
        self._downlink = Downlink(self.compression, compressible(self.client_sides), setup.buffers)
        check_privacy(
            self.client_sides,
            step,
            self.secure_aggregation,
            self.compression.up,
            evaluate_on_clients=setup.evaluate_on_clients,
            per_client=self.client_metrics.per_client,
        )
        check_robust(self.client_sides, step)
        if setup.evaluate_on_clients:
            check_output(step.output)
        reading = reading_models((step.aggregator, step.output, *step.transforms, *step.observers))
        slow = parts.asynchronous is not None and parts.asynchronous.towards_model
        check_downlink(self.compression.down, reading, towards_model=slow)
        self.federation = setup.federation
        self.sampler = parts.sampler or FixedSizeSampler()
        self._clients = round_clients(
            self.sampler,
            setup.system,
            parts.asynchronous,
            options=setup.local_training,
            step=step,
            secure=self.secure_aggregation,
            federation=self.federation,
            evaluate_on_clients=setup.evaluate_on_clients,
            reading=reading,
        )
        self._evaluating: list[Message] = []  # the messages of the evaluation that goes on
        self._evaluation_failures: list[str] = []  # of the last one
        self._rules = Rules(
            step=step,
            client_sides=self.client_sides,
            options=setup.local_training,
            metrics=self.client_metrics,
            secure=self.secure_aggregation,
            compression=self.compression,
        )
        self.state = StrategyState()
        self._resumed_after = 0  # the round of the checkpoint
        self._availability: ClientAvailability | None = None
        self._per_client: dict[str, dict[int, float]] = {}  # of the last evaluation at the clients

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
            num_rounds: the last round; 0 evaluates the initial model, at the clients, too.
            timeout: seconds to wait for a round's replies.
            train_config: further entries of the clients' config.
            evaluate_config: the same for evaluation at the clients.
            evaluate_fn: evaluates the output at the server; returns None for a round to skip.
            on_round: called with each finished round and its x; True ends the run. An error that
                ends the run is in the report (``fatal``), and is raised afterwards.

        Returns the metrics by round and, as ``arrays``, the last output model.

        Raises:
            ConfigError: if an earlier call has run these rounds already.
        """
        if self.state.round > self._resumed_after and self.state.round >= num_rounds:
            raise ConfigError(
                f"num_rounds={num_rounds}: this strategy has run {self.state.round} rounds. Make a "
                "new one to begin again, or name a later last round to go on from initial_arrays"
            )
        self._register(grid, to_tensors(initial_arrays))
        self.summary()
        run = {NUM_ROUNDS: num_rounds, TIMEOUT: timeout}
        train_config = ConfigRecord({**(train_config or {}), **run})
        evaluate_config = ConfigRecord({**(evaluate_config or {}), **run})
        result, arrays, report = Result(), initial_arrays, RoundReport(round=0)
        result.arrays = self._output_model(arrays)
        first, failed = self.state.round + 1, 0  # a resumed run has all its chances again
        for round in range(0 if first == 1 else first, num_rounds + 1):
            if round > 0:
                report, trained, metrics = self._train(grid, round, arrays, train_config)
                if trained is not None and metrics is not None:
                    arrays, result.train_metrics_clientapp[round] = trained, metrics
                failed = failed + 1 if self.state.failed_rounds else 0
                report.fatal = self._error_of_failed(failed, report) if failed else None
                result.arrays = self._output_model(arrays)
            if round > 0 or num_rounds == 0:
                asked = list(self.configure_evaluate(round, result.arrays, evaluate_config, grid))
                replies = grid.send_and_receive(asked, timeout=timeout) if asked else ()
                found = self.aggregate_evaluate(round, replies)
                report.failures = [*report.failures, *self._evaluation_failures]
                if found is not None:
                    result.evaluate_metrics_clientapp[round] = found
                    report.client_evaluation = scalars(found)
                    report.per_client |= self._per_client
            evaluation = evaluate_fn(round, result.arrays) if evaluate_fn else None
            if evaluation is not None:
                result.evaluate_metrics_serverapp[round] = evaluation
                report.evaluation = scalars(evaluation)
            stop = on_round is not None and on_round(report, arrays)
            if report.fatal is not None:
                raise report.fatal
            if stop:
                log(INFO, "Stopped after round %s", round)
                break
        return result

    def restore(self, state: StrategyState) -> None:
        """Continue after ``state.round`` when ``start`` is called next."""
        self.state, self._resumed_after = state, state.round
        self.state.kept = self.state.tensors.get(KEPT, {})
        self.state.mark_durable()

    def snapshot(self) -> StrategyState:
        """Return the state to ``restore``, together with the params of the last finished round."""
        tensors = self.server_step.state_dict()
        if self.state.kept:
            tensors = {**tensors, KEPT: self.state.kept}
        if isinstance(self._clients, SimulatedClients):
            self.state.in_flight = self._clients.state()
            tensors |= self._clients.tensors()
        return replace(copy.deepcopy(replace(self.state, tensors={}, kept={})), tensors=tensors)

    @property
    def num_clients(self) -> int:
        """N, how many clients have registered; 0 before ``start``."""
        return 0 if self._availability is None else len(self._availability.registry)

    @property
    def availability(self) -> ClientAvailability:
        """The registered clients, and which of them are connected; after ``start``."""
        if self._availability is None:
            raise RuntimeError("no client is registered yet: call start() first")
        return self._availability

    def personal_scores(self) -> dict[str, float]:
        """Return the mean scores of the clients' own models, over all that have trained so far."""
        return mean_scores(self.state.personal.values())

    # ---- Flower's hooks ----------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> TrainingRound:
        """Sample the cohort and return its messages."""
        availability, writer, step = self.availability, self._writer, self.server_step
        sizes = MessageSizes(self._downlink, self.client_sides)
        exchange = Exchange(grid, availability, writer, config, step, sizes)
        chosen = self._clients.choose(exchange, server_round, self.state.clock, arrays)
        lr, absent = writer.lr(server_round, config), sorted(availability.absent)
        report, params = RoundReport(server_round, lr, absent=absent), to_tensors(arrays)
        report.take_chosen(chosen)
        told = {c: writer.lr(round, config) for c, round in chosen.rounds(server_round).items()}
        rule = self._rules.of_round(
            params, availability.registry, self.state, chosen, server_round, told
        )
        return TrainingRound(params, chosen, rule, timeout_of(config), report)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate the replies and take the step; (None, None) leaves the model as it was."""
        if not isinstance(replies, RoundReplies):
            raise TypeError("aggregate_train needs the replies with their round: RoundReplies")
        training, report = replies.round, replies.round.report
        step, num_clients = self.server_step, len(self.availability.registry)
        fold = replies.fold(step.check)
        fold.refuse_misfits()
        report.take(fold, len(training.chosen.clients))
        self.state.round, self.state.clock = server_round, report.simulated_seconds or 0.0
        if len(fold.replies) < max(self.federation.min_replies, step.least_replies):
            self.state.failed_rounds += 1
            return None, None
        self.state.failed_rounds = 0
        rounds = training.chosen.rounds(server_round)
        before = {client: self.state.committed.get(client, 0) for client in report.clients}
        self.state.commit({client: rounds[client] for client in report.clients})
        began, valid = time.perf_counter(), fold.replies
        params = step(training.params, fold, server_round, num_clients, training.chosen.rebase)
        report.server_seconds = time.perf_counter() - began
        report.take_trust(step.robust.trust if step.robust else {}, step.alarms)
        self._restart_if_lost(valid, params, server_round, before)
        scores = {reply.client_id: personal_scores(reply.metrics) for reply in valid}
        scores = {client: found for client, found in scores.items() if found}
        # a secure sum has the mean of this round's clients alone, which is no client's own score
        kept = {} if self.secure_aggregation else self.state.personal
        self.state.personal = kept | scores
        own = [(reply.client_id, reply.metrics) for reply in valid]
        report.per_client = self.client_metrics.of_training(own)
        means = mean_metrics([reply.metrics for reply in valid])
        report.metrics = means | self.personal_scores() | step.metrics()
        return to_record(params), to_metrics(report.metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages to the clients, if these evaluate in an exchange of their own.

        Where a client holds examples out, those that do not are not asked: scores on examples that
        were trained on would mix with the others.
        """
        if not self.setup.evaluate_on_clients:
            return []
        asked = self.availability.ask(grid, self.availability.present)
        held_out = self.availability.registry.num_held_out
        if any(held_out.values()):
            asked = [client for client in asked if held_out[client]]
        kind = MessageType.EVALUATE
        messages = self._writer.model(kind, server_round, arrays, config, asked)
        self._evaluating = list(messages.values())
        return self._evaluating

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the example-weighted mean of the clients' metrics, without bad replies."""
        names, registry = self.client_metrics.names, self.availability.registry
        sent = self._evaluating
        found = valid_evaluations(with_senders(replies, sent), sent, registry, names)
        rows, self._evaluation_failures = found
        self._per_client = self.client_metrics.of_evaluation(rows)
        return to_metrics(mean_metrics(rows)) if rows else None

    def summary(self) -> None:
        """Log the parts."""
        step, secure, codecs = self.server_step, self.secure_aggregation, self.compression.codecs
        slots = (step.aggregator, step.optimizer, step.output, self.sampler, secure, *codecs)
        names = ", ".join(type(slot).__name__ for slot in slots if slot is not None)
        sides = sorted({*self.client_sides, *self.server_sides})
        log(INFO, "%s: sides %s, %s", type(self).__name__, sides, names)

    def ask_clients(
        self,
        grid: Grid,
        message_type: str,
        arrays: ArrayRecord,
        config: ConfigRecord,
        timeout: float = 3600,
    ) -> dict[int, RecordDict]:
        """Send a model to all connected clients, after the rounds; see ``exchange``."""
        self.availability.refresh(grid)
        config = ConfigRecord({**config, TIMEOUT: timeout})
        asked = self.availability.ask(grid, self.availability.present)
        messages = self._writer.model(message_type, self.state.round, arrays, config, asked)
        return exchange(grid, messages, timeout)

    # ---- pieces ------------------------------------------------------------------------------

    @property
    def _writer(self) -> MessageWriter:
        nodes = self.availability.registry.nodes
        return MessageWriter(
            nodes, self.state, self.setup.local_lr, self.setup.schedule, self._downlink
        )

    def _register(self, grid: Grid, initial: Tensors) -> None:
        """Initialise the server's parts; register the clients and check their number."""
        self.server_step.init(initial, self.state.tensors)
        if isinstance(self._clients, SimulatedClients):
            self._clients.restore(self.state.in_flight, self.state.tensors)
        registry = register_clients(grid, self.federation)
        num_clients = len(registry)
        most = most_clients(self.sampler, num_clients)
        self.federation.check_cohort(num_clients, most)
        self.server_step.check_cohort(num_clients, most)
        check_buffer(self._clients, num_clients, self.federation.min_replies)
        require_no_buffers(self.client_sides, self.server_step.buffers & initial.keys())
        if self.secure_aggregation is not None:
            self.secure_aggregation.check(num_clients)
            reply_layout(self.client_sides, self.server_step, self.secure_aggregation, initial)
        self._availability = ClientAvailability(registry, self.federation)

    def _train(
        self, grid: Grid, round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[RoundReport, ArrayRecord | None, MetricRecord | None]:
        """Run one training round."""
        secure_least = 0 if self.secure_aggregation is None else LEAST
        self.availability.refresh(grid, max(self.server_step.least_replies, secure_least))
        began = time.perf_counter()
        training = self.configure_train(round, arrays, config, grid)
        report, secure = training.report, self.secure_aggregation
        exchanged, messages, timeout = None, training.messages, training.timeout
        if secure is not None:
            layout = reply_layout(self.client_sides, self.server_step, secure, training.params)
            exchanged = secure.exchange(grid, messages, layout, round, timeout)
            self.server_step.rounding = exchanged.rounding
            replies = RoundReplies(training, exchanged.replies)
        else:  # an override of aggregate_train may look at messages
            own = type(self).aggregate_train is not FederatedStrategy.aggregate_train
            replies = send_round(grid, training, self.server_step.single_check, own=own)
        trained, metrics = self.aggregate_train(round, replies)
        if exchanged is not None:
            report.bytes_up, report.bytes_down = exchanged.bytes_up, exchanged.bytes_down
            report.failures = [*report.failures, *exchanged.failures]
        report.seconds = time.perf_counter() - began
        return report, trained, metrics

    def _error_of_failed(self, failed: int, report: RoundReport) -> Exception | None:
        least = max(self.federation.min_replies, self.server_step.least_replies)
        return self.federation.error_of_failed(failed, report, least)

    def _output_model(self, arrays: ArrayRecord) -> ArrayRecord:
        return arrays if (found := self.server_step.output_model) is None else to_record(found)

    def _restart_if_lost(
        self, replies: Sequence[Reply], params: Tensors, round: int, before: Mapping[int, int]
    ) -> None:
        """Restart the parts that are coupled to client states, where a client has lost its own.

        A state from before the run was resumed (``before``: the versions that the clients started
        from) is gone with the Flower run that it was kept in, through no fault of the client's.
        """
        if lost := [reply.client_id for reply in replies if reply.metrics.get(STATE_LOST)]:
            keys = self.server_step.restart_coupled(params)
            again = f": all clients restart {', '.join(sorted(keys))}" if keys else ""
            log(WARNING, "round %s: clients %s have lost their state%s", round, lost, again)
            if keys:
                by = [client for client in lost if before[client] > self._resumed_after]
                self.state.restart(keys, round, by)
                self._clients.forget()
