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
from fedhet.strategies.compatibility import Composition, check
from fedhet.strategies.components.aggregators import WeightedMean
from fedhet.strategies.components.model_outputs import Latest
from fedhet.strategies.components.samplers import FixedSizeSampler, most_clients
from fedhet.strategies.components.server_optimizers import SGD
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.live_clients import LiveClients
from fedhet.strategies.modes.private.clipping import require_no_buffers
from fedhet.strategies.modes.secure.aggregation import SecureReplies
from fedhet.strategies.modes.secure.reply_vector import Layout
from fedhet.strategies.modes.secure.spoilers import SpoilerSearch, searched
from fedhet.strategies.modes.secure.workflow import LEAST
from fedhet.strategies.modes.simulated_clients import SimulatedClients
from fedhet.strategies.modes.systems import SystemClients
from fedhet.strategies.parts import Parts, Setup
from fedhet.strategies.round.availability import ClientAvailability
from fedhet.strategies.round.checks import check_sides
from fedhet.strategies.round.evaluation import EvaluationReplies, EvaluationRound, valid_evaluations
from fedhet.strategies.round.expectations import Expectations
from fedhet.strategies.round.registration import register_clients
from fedhet.strategies.round.reply_fold import FoldSettings
from fedhet.strategies.round.round_report import RoundReport, StrategyState
from fedhet.strategies.round.selection import RoundStart, SampledClients, Selection, Selector
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.round.training_round import RoundReplies, TrainingRound, send_round
from fedhet.strategies.wire.compressed_records import Downlink, compressible
from fedhet.strategies.wire.compression import Compression
from fedhet.strategies.wire.messages import NUM_ROUNDS, TIMEOUT, MessageWriter, query, timeout_of
from fedhet.strategies.wire.records import (
    KEPT,
    NUM_CLIENTS,
    mean_metrics,
    mean_scores,
    personal_scores,
    record_of_copy,
    scalars,
    to_metrics,
    to_record,
    to_tensors,
)

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
OnRound = Callable[[RoundReport, ArrayRecord], bool]
ShouldStop = Callable[[int, Result], bool]


class FederatedStrategy(Strategy):
    """The rounds of a method, from its parts, in a run's setup; FedAvg by default."""

    def __init__(self, parts: Parts | None = None, setup: Setup | None = None) -> None:
        parts, self.setup = parts or Parts(), setup or Setup()
        setup = self.setup
        self.client_sides = dict(parts.client_sides)
        self.server_sides = dict(parts.server_sides)
        check_sides(
            self.client_sides, self.server_sides, allow_stacked=setup.allow_stacked_corrections
        )
        self.secure_aggregation = parts.secure_aggregation
        self.server_step = ServerStep(
            self.server_sides,
            parts.aggregator or WeightedMean(),
            parts.server_optimizer or SGD(),
            list(parts.transforms.values()),
            frozenset(setup.buffers),
            parts.output or Latest(),
            setup.server_model,
            setup.observers,
            summed=self.secure_aggregation is not None,
        )
        self.client_metrics = setup.client_metrics
        self.compression = parts.compression or Compression()
        check(Composition(parts, setup, self.server_step))
        self.federation = setup.federation
        self.sampler = parts.sampler or FixedSizeSampler()
        self.selector = self._selector(parts.asynchronous)
        options = setup.local_training
        self._expectations = Expectations(
            self.server_step,
            self.client_sides,
            None if options is None else options.max_steps,
            self.client_metrics.in_train_replies,
            self.compression,
            setup.untrained,
        )
        payloads = compressible(self.client_sides)
        self._downlink = Downlink(self.compression, payloads, setup.buffers, setup.untrained)
        self.state = StrategyState()
        self._resumed_after = 0  # the round of the checkpoint
        self._availability: ClientAvailability | None = None
        self._num_trainers = 0

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
        should_stop: ShouldStop | None = None,
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
            should_stop: called with the number of each finished round, from 1 on, and the result so
                far; True ends the run. Flower has it since 1.43, fedhet with every release.
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
        result, arrays, report = Result(), initial_arrays, RoundReport(0)
        result.arrays = self._output_model(arrays)
        first, failed = self.state.round + 1, 0  # a resumed run has all its chances again
        for round in range(0 if first == 1 else first, num_rounds + 1):
            if round > 0:
                report, trained, metrics = self._train(grid, round, arrays, train_config)
                if trained is not None and metrics is not None:
                    arrays, result.train_metrics_clientapp[round] = trained, metrics
                failed = failed + 1 if self.state.failed_rounds and not report.searching else 0
                if failed:
                    least = self.server_step.least_replies
                    report.fatal = report.error_of_failed(failed, self.federation, least)
                result.arrays = self._output_model(arrays)
            if round > 0 or num_rounds == 0:
                asked = self.configure_evaluate(round, result.arrays, evaluate_config, grid)
                sent = list(asked)
                answers = grid.send_and_receive(sent, timeout=timeout) if sent else ()
                found = self.aggregate_evaluate(round, EvaluationReplies(asked, answers))
                report.failures = [*report.failures, *asked.failures]
                if found is not None:
                    result.evaluate_metrics_clientapp[round] = found
                    report.client_evaluation = scalars(found)
                    report.per_client |= asked.per_client
            evaluation = evaluate_fn(round, result.arrays) if evaluate_fn else None
            if evaluation is not None:
                result.evaluate_metrics_serverapp[round] = evaluation
                report.evaluation = scalars(evaluation)
            stop = on_round is not None and on_round(report, arrays)
            if report.fatal is not None:
                raise report.fatal
            stop = stop or (round > 0 and should_stop is not None and should_stop(round, result))
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
        self.state.in_flight = self.selector.in_flight_state()
        tensors |= self.selector.tensors()
        return replace(copy.deepcopy(replace(self.state, tensors={}, kept={})), tensors=tensors)

    @property
    def client_names(self) -> dict[int, str]:
        """The names of the clients that have one, by client."""
        return {} if self._availability is None else self._availability.registry.names

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
        """Select the clients and return their messages."""
        availability, writer, step = self.availability, self._writer, self.server_step
        start = RoundStart(
            server_round,
            self.state.clock,
            arrays,
            config,
            grid,
            availability,
            step,
            writer,
            self.client_sides,
        )
        selection = self.selector.select(start)
        params, report = to_tensors(arrays), RoundReport(server_round)
        report.lr = writer.lr(server_round, config)
        report.names, report.absent = self.client_names, sorted(availability.absent)
        report.take_selection(selection)
        rounds = selection.rounds(server_round)
        told = {client: (round, writer.lr(round, config)) for client, round in rounds.items()}
        folding = self._folding(params, selection, told)
        timeout = timeout_of(config)
        return TrainingRound(server_round, params, selection, folding, timeout, report)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies and take the step; (None, None) leaves the model as it was."""
        if not isinstance(replies, RoundReplies):
            raise TypeError("aggregate_train needs the replies with their round: RoundReplies")
        training, report = replies.round, replies.round.report
        step, selection = self.server_step, training.selection
        fold = replies.fold(step.check)
        fold.refuse_misfits()
        report.take(fold, len(selection.clients))
        self.state.round, self.state.clock = server_round, report.simulated_seconds or 0.0
        if len(fold.replies) < max(self.federation.min_replies, step.least_replies):
            self.state.failed_rounds += 1
            return None, None
        self.state.failed_rounds = 0
        rounds = selection.rounds(server_round)
        before = {client: self.state.committed.get(client, 0) for client in report.clients}
        self.state.commit({client: rounds[client] for client in report.clients})
        began, valid = time.perf_counter(), fold.replies
        stepped = step(training.params, fold, server_round, self._num_trainers, selection.rebase)
        report.server_seconds = time.perf_counter() - began
        report.trust, report.alarms = stepped.trust, dict(sorted(stepped.alarms.items()))
        self._restart_if_lost(valid, stepped.params, server_round, before)
        self._take_scores(valid)
        own = [(reply.client_id, reply.metrics) for reply in valid]
        report.per_client = self.client_metrics.of_training(own)
        means = mean_metrics([reply.metrics for reply in valid])
        measured = {**stepped.diagnostics, **step.metrics()}
        report.metrics = means | self.personal_scores() | measured
        return record_of_copy(stepped.params), to_metrics(report.metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> EvaluationRound:
        """Return messages to the clients, if these evaluate in an exchange of their own.

        If a client holds examples out, those that do not are not asked: scores on examples that
        were trained on would mix with the others.
        """
        if not self.client_metrics.asked:
            return EvaluationRound()
        asked = self.availability.ask(grid, self.availability.present)
        held_out = self.availability.registry.num_held_out
        if any(held_out.values()):
            asked = [client for client in asked if held_out[client]]
        kind = MessageType.EVALUATE
        messages = self._writer.model(kind, server_round, arrays, config, asked)
        return EvaluationRound(messages)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the example-weighted mean of the clients' metrics, without bad replies."""
        if not isinstance(replies, EvaluationReplies):
            raise TypeError("aggregate_evaluate needs the answers with their round")
        asked, registry = replies.round, self.availability.registry
        names = self.client_metrics.names
        rows, failures = valid_evaluations(replies, asked.messages, registry, names)
        asked.failures.extend(failures)
        asked.per_client.update(self.client_metrics.of_evaluation(rows))
        return to_metrics({**mean_metrics(rows), NUM_CLIENTS: len(rows)}) if rows else None

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
        *,
        unseen: bool = False,
    ) -> dict[int, RecordDict]:
        """Send a model to all connected clients after the rounds; see ``query``.

        Those that never train are asked only with ``unseen``.
        """
        self.availability.refresh(grid)
        config = ConfigRecord({**config, TIMEOUT: timeout})
        known = self.availability
        asked = known.ask(grid, known.present if unseen else known.trainers)
        messages = self._writer.model(message_type, self.state.round, arrays, config, asked)
        return query(grid, messages, timeout)

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
        self.selector.restore(self.state.in_flight, self.state.tensors)
        registry = register_clients(grid, self.federation)
        num_clients = self._num_trainers = self.federation.num_trainers(len(registry))
        most = most_clients(self.sampler, num_clients)
        self.federation.check_cohort(num_clients, most)
        self.server_step.check_cohort(num_clients, most)
        self.selector.check(num_clients, self.federation.min_replies)
        require_no_buffers(self.client_sides, self.server_step.buffers & initial.keys())
        if self.secure_aggregation is not None:
            self.secure_aggregation.check(num_clients, most)
            self._layout(initial)
        self._availability = ClientAvailability(registry, self.federation)
        if self._secure_finds_spoilers:
            self._hold_back(self._search)

    def _train(
        self, grid: Grid, round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[RoundReport, ArrayRecord | None, MetricRecord | None]:
        """Run one training round: select, send, fold, step."""
        secure = self.secure_aggregation
        secure_least = 0 if secure is None else LEAST
        self.availability.refresh(grid, max(self.server_step.least_replies, secure_least))
        began = time.perf_counter()
        training = self.configure_train(round, arrays, config, grid)
        if secure is not None:
            replies: RoundReplies = secure.send(grid, training, self._layout(training.params))
        else:  # an override of aggregate_train may look at messages
            own = type(self).aggregate_train is not FederatedStrategy.aggregate_train
            replies = send_round(grid, training, self.server_step.single_check, own=own)
        trained, metrics = self.aggregate_train(round, replies)
        replies.complete(training.report)
        if isinstance(replies, SecureReplies) and self._secure_finds_spoilers:
            self._hold_back(searched(self._search, replies, self.num_clients, self._least_clients))
        training.report.seconds = time.perf_counter() - began
        return training.report, trained, metrics

    @property
    def _secure_finds_spoilers(self) -> bool:
        return self.secure_aggregation is not None and self.secure_aggregation.find_spoilers

    @property
    def _search(self) -> SpoilerSearch:
        return SpoilerSearch.of(self.state.spoilers)

    def _hold_back(self, search: SpoilerSearch) -> None:
        """Let the next round do without clients that spoil secure sums, or may."""
        self.state.spoilers = dict(vars(search))
        held = search.left_out(self.num_clients, self._least_clients)
        self.availability.held_back = held

    @property
    def _least_clients(self) -> int:
        """How many clients must be there for a secure round to have enough."""
        size = self.num_clients
        needed = max(LEAST, self.federation.min_replies, self.server_step.least_replies)
        enough = (n for n in range(1, size) if most_clients(self.sampler, n) >= needed)
        return next(enough, size)

    def _selector(self, asynchronous: Asynchronous | None) -> Selector:
        """Return what selects the clients: a mode, or the sampler alone."""
        system, options = self.setup.system, self.setup.local_training
        if asynchronous is not None and system is not None:
            return SimulatedClients(asynchronous, self.sampler, system, options)
        if asynchronous is not None:
            return LiveClients(asynchronous, self.sampler, self.server_step.buffers)
        if system is not None:
            least = max(self.federation.min_replies, self.server_step.least_replies)
            return SystemClients(self.sampler, system, options, least)
        return SampledClients(self.sampler, from_all=self.server_step.releases_noise)

    def _folding(
        self, params: Tensors, selection: Selection, told: Mapping[int, tuple[int, float]]
    ) -> FoldSettings:
        """Return how a round's replies are checked and added up."""
        registry, secure = self.availability.registry, self.secure_aggregation
        if secure is None:
            return self._expectations.of_round(params, registry, self.state, selection, told)
        size = len(selection.clients)
        rounding = secure.step(size) if size else 0.0
        return self._expectations.of_secure_round(
            params, registry, selection, secure.max_examples, rounding
        )

    def _layout(self, tensors: Tensors) -> Layout:
        """Return the layout of the replies that a secure sum adds up."""
        assert self.secure_aggregation is not None
        most = self.secure_aggregation.max_examples
        return Layout.of_round(self.client_sides, self.server_step, tensors, most)

    def _take_scores(self, replies: Sequence[Reply]) -> None:
        """Keep the scores of the clients' own models."""
        scores = {reply.client_id: personal_scores(reply.metrics) for reply in replies}
        scores = {client: found for client, found in scores.items() if found}
        # a secure sum has the mean of this round's clients alone, which is no client's own score
        before = {} if self.secure_aggregation else self.state.personal
        self.state.personal = before | scores

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
                self.selector.forget()
