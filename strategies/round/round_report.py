"""Report of a finished round, and the state from which a strategy resumes after it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from fedhet.common.errors import DivergedError
from fedhet.common.metrics import row_key
from fedhet.common.results import said_once
from fedhet.strategies.base import Payloads
from fedhet.strategies.round.registration import FederationConfig
from fedhet.strategies.round.reply_fold import ReplyFold
from fedhet.strategies.round.selection import Arrived, Selection
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.records import count_bytes

_NAMED = 5  # reasons, and clients of one
_LEFT_OUT, _HALF = 1e-3, 0.5  # of what a reply counts in the plain mean


class RoundReport:
    """One round, written as it goes on."""

    def __init__(self, round: int) -> None:
        self.round = round  # t, from 1 (0: the initial model)
        self.lr = 0.0  # the local learning rate
        self.clients: Sequence[int] = ()  # whose replies were aggregated
        self.names: Mapping[int, str] = {}  # of the clients that have one
        # clients that were not connected when the round began, or that secure rounds do without
        self.absent: Sequence[int] = ()
        self.dropped: Sequence[int] = ()  # of a simulated system: asked, but they never answer
        self.late: Sequence[int] = ()  # the same: they answer after the round's end
        self.staleness: Sequence[int] = ()  # of asynchronous rounds: steps since each started
        self.simulated_seconds: float | None = None  # since the run's start, by the system's clock
        self.failures: Sequence[str] = ()  # one reason for each missing or refused reply
        self.diverged = False  # more than half of the clients asked sent NaN or Inf
        self.metrics: Mapping[str, float] = {}  # means of the clients' metrics
        self.trust: Mapping[int, float] = {}  # under a robust aggregator: how far a reply counted
        # what stands out of clients that do, and how far (z): the update, or a payload by its name
        self.alarms: Mapping[int, Mapping[str, float]] = {}
        self.bytes_down = self.bytes_up = 0  # serialised array bytes sent, and received
        self.seconds = 0.0  # from sampling to the new params, without evaluation
        self.server_seconds = 0.0  # the part of ``seconds`` after the last reply
        # metrics of the output model, if evaluated: on the server's test set, and at the clients
        self.evaluation: Mapping[str, float] = {}
        self.client_evaluation: Mapping[str, float] = {}
        # with evaluation.per_client: by the name of a mean in the row, each client's value by id
        self.per_client: dict[str, dict[int, float]] = {}
        self.searching = False  # the round failed, and has narrowed down by whom
        self.fatal: Exception | None = None  # the run ends with this round

    def take_selection(self, selection: Selection) -> None:
        """Record who is asked, who will not count, when the round ends, and the bytes sent."""
        outcome, messages = selection.outcome, selection.messages
        sizes = [count_bytes(message.content) for message in messages.values()]
        self.clients, self.dropped, self.late = list(messages), outcome.dropped, outcome.late
        versions = sorted(selection.versions.items())  # by client, as ``clients``
        self.staleness = [self.round - 1 - version for _, version in versions]
        self.simulated_seconds = selection.clock + outcome.seconds
        in_vain = len(outcome.dropped) + len(outcome.late)
        self.bytes_down = sum(sizes) + in_vain * max(sizes, default=0)

    def take_arrived(self, arrived: Arrived) -> None:
        """Record the outcome for real clients in asynchronous rounds."""
        self.late, self.staleness = arrived.late, arrived.staleness
        self.bytes_down = arrived.bytes_down

    def take(self, fold: ReplyFold, asked: int) -> None:
        """Record and log the outcome for each client that was asked."""
        self.clients = [reply.client_id for reply in fold.replies]
        refused = (f"client {client}: {why}" for client, why in sorted(fold.refused.items()))
        self.failures, self.bytes_up = [*refused, *fold.unasked], fold.bytes_up
        self.diverged = 2 * fold.non_finite > asked
        for failure in said_once(self.failures):
            log(WARNING, "round %s: %s", self.round, failure)

    def reasons(self) -> str:
        """Return why replies are missing, in a line."""
        in_vain = [
            f"{what}: clients {list(clients)[:_NAMED]}"
            for what, clients in (
                ("dropped out (system.dropout)", self.dropped),
                ("came too late (system.deadline_seconds)", self.late),
            )
            if clients
        ]
        return (
            "; ".join([*said_once(self.failures)[:_NAMED], *in_vain])
            or "none: too few clients were asked"
        )

    def error_of_failed(
        self, failed: int, federation: FederationConfig, needed_by_method: int
    ) -> Exception | None:
        """Log the last of ``failed`` failed rounds in a row; return its error if too many.

        ``needed_by_method`` is how many replies the aggregator needs; min_replies may be more.
        """
        most, valid = federation.max_failed_rounds, len(self.clients)
        needed = f"min_replies={federation.min_replies}"
        if needed_by_method > federation.min_replies:
            needed = f"the {needed_by_method} that strategy.aggregator needs"
        log(WARNING, "%s valid replies, fewer than %s: the model is unchanged", valid, needed)
        if failed < most:
            return None
        message = (
            f"{failed} rounds in a row had fewer valid replies than {needed} "
            f"(max_failed_rounds={most}); the last failures: {self.reasons()}"
        )
        return self.error(message)

    def error(self, message: str) -> Exception:
        """Return the error of a run that ends with this round because valid replies are missing."""
        if not self.diverged:
            return RuntimeError(message)
        return DivergedError(f"{message}. Smaller steps may help: local.lr, local.clip, server.lr")

    def row(self) -> dict[str, Any]:
        """Return the round's line of metrics.jsonl (see ``fedhet.common.results``)."""
        row: dict[str, Any] = {"round": self.round, **self.evaluation}
        if self.round > 0:
            row |= {row_key(name): value for name, value in self.metrics.items()}
            figures = ("lr", "seconds", "server_seconds", "bytes_up", "bytes_down")
            row |= {name: getattr(self, name) for name in figures}
            row |= {"clients": list(self.clients), "failures": list(self.failures)}
            if self.names:
                row["client_names"] = [self.names.get(one, str(one)) for one in self.clients]
        elif self.failures:  # of the clients' evaluation
            row["failures"] = list(self.failures)
        trust = sorted(self.trust.items())
        if left_out := [client for client, one in trust if one <= _LEFT_OUT]:
            row["left_out"] = left_out
        if less := {str(c): round(one, 4) for c, one in trust if _LEFT_OUT < one < _HALF}:
            row["down_weighted"] = less
        if self.alarms:
            found = {str(c): round(max(z.values()), 1) for c, z in self.alarms.items()}
            row |= {"alarms": len(found), "standing_out": found}
        for name in ("absent", "dropped", "late"):
            if clients := getattr(self, name):
                row[name] = list(clients)
        if self.staleness:
            row["staleness"] = statistics.fmean(self.staleness)
            row["max_staleness"] = max(self.staleness)
        if self.simulated_seconds:
            row["simulated_seconds"] = self.simulated_seconds
        row |= {f"client_{row_key(name)}": value for name, value in self.client_evaluation.items()}
        if self.per_client:
            row["per_client"] = {
                name: {str(client): value for client, value in sorted(values.items())}
                for name, values in self.per_client.items()
            }
        return row


@dataclass(kw_only=True)
class StrategyState(ClientVersions):
    """What a strategy needs to resume after ``round``, besides the params."""

    round: int = 0  # the last finished one
    failed_rounds: int = 0  # in a row, with too few replies
    clock: float = 0.0  # simulated seconds
    # of asynchronous rounds: version and end of the clients that train, by client id as text
    in_flight: dict[str, list[float]] = field(default_factory=dict)
    # of secure rounds: the search for clients that spoil sums (modes/secure/spoilers.py)
    spoilers: dict[str, Any] = field(default_factory=dict)
    # by client id, the scores of its own model when it was last trained
    personal: dict[int, dict[str, float]] = field(default_factory=dict)
    # the state of every side and of the server optimiser, by "<owner>/<group>"
    tensors: Payloads = field(default_factory=dict)
