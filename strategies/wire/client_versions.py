"""Versions of the client states: where each client starts a round, and which it may drop.

A client stores its state under the round after which it was saved. It starts from the version of
its last aggregated reply, so a lost or refused reply, or a resumed run, leaves no trace in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fedhet.strategies.base import Tensors


@dataclass
class ClientVersions:
    """The versions of all clients."""

    # names this run in the clients' state stores
    experiment: str = field(default_factory=lambda: uuid.uuid4().hex)
    # round of each client's last aggregated reply
    committed: dict[int, int] = field(default_factory=dict)
    # by key of the client state, the round after which all clients start it again
    restarted: dict[str, int] = field(default_factory=dict)
    # clients whose lost state was the reason, since the server has started: no checkpoint has them
    restarted_by: set[int] = field(default_factory=set)
    # ``committed`` of the last checkpoint on disk, and of the one before it
    durable: dict[int, int] = field(default_factory=dict)
    durable_before: dict[int, int] = field(default_factory=dict)
    # what a client keeps for itself begins as these tensors; those that are not here as the seed's
    kept: Tensors = field(default_factory=dict)

    def commit(self, rounds: Mapping[int, int]) -> None:
        """Make the states that clients saved in these rounds their current versions."""
        self.committed |= rounds

    def mark_durable(self, committed: Mapping[int, int] | None = None) -> None:
        """Record that a checkpoint of these versions is on disk; None: of the current ones."""
        versions = self.committed if committed is None else committed
        self.durable_before, self.durable = self.durable, dict(versions)

    def restart(self, keys: Iterable[str], round: int, by: Iterable[int]) -> None:
        """Make all clients drop these keys of the states that they saved up to ``round``.

        ``by`` are the clients that have lost theirs.
        """
        self.restarted |= dict.fromkeys(keys, round)
        self.restarted_by.update(by)

    def not_lost(self, client: int) -> str | None:
        """Return why a client may not say that it has lost its state; None: it may."""
        if client not in self.committed:
            return "and it had none"
        if client in self.restarted_by:
            return (
                "again, for which all clients' would start once more: its replies count no longer "
                "(give the node a state-folder that lasts, then resume the run)"
            )
        return None

    def config_of(self, client: int) -> dict[str, str | int]:
        """Return what a message tells a client about the versions of its state."""
        version = self.committed.get(client, 0)
        checkpoints = (self.durable_before, self.durable)
        dropped = (key for key, round in self.restarted.items() if version <= round)
        return {
            "experiment": self.experiment,
            "state-round": version,
            "state-keep": ",".join(str(kept.get(client, 0)) for kept in checkpoints),
            "state-dropped": ",".join(sorted(dropped)),
        }
