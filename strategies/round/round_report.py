"""Report of a finished round, and the state from which a strategy resumes after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strategies.base import Payloads
from strategies.round.client_versions import ClientVersions


@dataclass
class RoundReport:
    """One round.

    Attributes:
        round: t, from 1 (0: the initial model).
        lr: the local learning rate.
        clients: ids of the clients whose replies were aggregated.
        absent: ids of the clients that were not connected when the round began.
        failures: one reason for each missing or refused reply.
        metrics: example-weighted means of the clients' metrics.
        bytes_down: serialised array bytes sent to clients.
        bytes_up: serialised array bytes received from clients, refused replies included.
        seconds: from sampling to the new params, without evaluation.
        server_seconds: the part of ``seconds`` after the last reply.
        evaluation: metrics of the output model on the server's test set, if evaluated.
        client_evaluation: metrics of the output model at the clients, if evaluated there.
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


@dataclass(kw_only=True)
class StrategyState(ClientVersions):
    """What a strategy needs to resume after ``round``, besides the params.

    Attributes:
        round: the last finished round.
        failed_rounds: consecutive rounds with too few replies.
        personal: by client id, the scores of its own model when it was last trained.
        tensors: the state of every side and of the server optimiser, by "<owner>/<group>".
    """

    round: int = 0
    failed_rounds: int = 0
    personal: dict[int, dict[str, float]] = field(default_factory=dict)
    tensors: Payloads = field(default_factory=dict)
