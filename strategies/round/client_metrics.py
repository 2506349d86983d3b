"""What clients may report of evaluations beside loss and accuracy, and each client's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedhet.common.metrics import CLIENT, row_key

_RECEIVED = ("received-", "personal-test-", "personal-")  # prefixes in train replies
_SCORES = ("loss", "accuracy")


@dataclass(frozen=True)
class ClientMetrics:
    """The metrics of the recipe at the clients.

    Attributes:
        names: of the values that a client may send: ``f1``, ``f1/<class>``.
        per_client: whether a row of metrics.jsonl has each client's own values, too.
    """

    names: tuple[str, ...] = ()
    per_client: bool = False

    @property
    def in_train_replies(self) -> set[str]:
        """The names in train replies: of the received model, and of the client's own."""
        return {f"{prefix}{name}" for prefix in _RECEIVED for name in self.names}

    def of_training(
        self, replies: Iterable[tuple[int, Mapping[str, float]]]
    ) -> dict[str, dict[int, float]]:
        """Return the values of train replies by name and client; empty unless ``per_client``."""
        return self._table(replies, {p + n: p + n for p in _RECEIVED for n in self._all})

    def of_evaluation(self, rows: Iterable[Mapping[str, float]]) -> dict[str, dict[int, float]]:
        """Return the values of evaluations by name and client; empty unless ``per_client``."""
        replies = [(int(row["partition-id"]), row) for row in rows]
        return self._table(replies, {name: f"{CLIENT}{name}" for name in self._all})

    @property
    def _all(self) -> list[str]:
        return list(dict.fromkeys((*_SCORES, *self.names)))

    def _table(
        self, replies: Iterable[tuple[int, Mapping[str, float]]], names: Mapping[str, str]
    ) -> dict[str, dict[int, float]]:
        if not self.per_client:
            return {}
        found: dict[str, dict[int, float]] = {}
        for client, metrics in replies:
            for name, title in names.items():
                if name in metrics:
                    found.setdefault(row_key(title), {})[client] = metrics[name]
        return found
