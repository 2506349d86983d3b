"""What a finished round reports, and what a strategy must get back to go on after it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strategies.base import Payloads


@dataclass
class RoundReport:
    """One finished round.

    Attributes:
        round: t, from 1 (0: the initial model).
        lr: the local learning rate.
        clients: ids of the clients whose replies were aggregated.
        absent: ids of the clients that were not connected as the round began.
        failures: why each missing or refused reply was not.
        metrics: example-weighted means of what the clients measured.
        bytes_down: array bytes sent to clients, as serialised.
        bytes_up: array bytes received from clients, refused replies included.
        seconds: from sampling to the new params, evaluation not included.
        server_seconds: of these, what the server made of the replies in: aggregation and all about
            it.
        evaluation: metrics of the model that the round gives out on the server's test set, if
            evaluated.
        client_evaluation: the same at the clients, if they were asked.
    """

    round: int
    lr: float = 0.0
    clients: Sequence[int] = ()
    absent: Sequence[int] = ()
    failures: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    server_seconds: float = 0.0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    client_evaluation: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the round's line of metrics.jsonl (see ``common.results``)."""
        row: dict[str, Any] = {"round": self.round, **self.evaluation}
        if self.round > 0:
            row |= {_key(name): value for name, value in self.metrics.items()}
            row |= {
                "lr": self.lr,
                "seconds": self.seconds,
                "server_seconds": self.server_seconds,
                "bytes_up": self.bytes_up,
                "bytes_down": self.bytes_down,
                "clients": list(self.clients),
                "failures": list(self.failures),
            }
        if self.absent:
            row["absent"] = list(self.absent)
        row |= {f"client_{_key(name)}": value for name, value in self.client_evaluation.items()}
        return row


def _key(name: str) -> str:
    return name.replace("-", "_")


@dataclass
class StrategyState:
    """All a strategy must get back to go on after ``round``, beside the params.

    Attributes:
        round: the last finished round.
        experiment: names this run at the clients' state stores.
        committed: by client id, the round of its last aggregated reply: the version of its client
            state that the next round starts from.
        failed_rounds: how many rounds in a row had too few replies.
        restarted: by key of the client state, the round after which all clients start it again.
        personal: by client id, what its own model scored when it was last trained.
        tensors: every side's and the server optimiser's state, by "<owner>/<group>".
    """

    round: int = 0
    experiment: str = field(default_factory=lambda: uuid.uuid4().hex)
    committed: dict[int, int] = field(default_factory=dict)
    failed_rounds: int = 0
    restarted: dict[str, int] = field(default_factory=dict)
    personal: dict[int, dict[str, float]] = field(default_factory=dict)
    tensors: Payloads = field(default_factory=dict)
