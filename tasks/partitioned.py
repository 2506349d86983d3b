"""What every task's partition provides: a client's rows to train on, and held-out rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError
from fedhet.tasks.partitions import PartitionConfig, hold_out, partition_rows
from fedhet.tasks.sources.arrays import Indices


class Partitioned(ABC):
    """A task whose training examples are divided over N clients."""

    partition: PartitionConfig
    seed: int
    num_clients: int
    by_client: bool = False  # whether a function gives each client its own, and nothing is divided

    @property
    @abstractmethod
    def strata(self) -> Indices:
        """What a partition by label divides by: a number for each training example."""

    @property
    @abstractmethod
    def owners(self) -> NDArray[np.str_] | None:
        """The client of each training example; None if unknown."""

    @property
    @abstractmethod
    def count_names(self) -> tuple[str, ...]:
        """The names of the columns of :meth:`class_counts`."""

    @property
    def num_train(self) -> int:
        """The number of training examples that the clients share."""
        return len(self.strata)

    @cached_property
    def client_rows(self) -> list[Indices]:
        """The rows of the training examples that each client holds."""
        return partition_rows(
            self.partition, self.strata, self.owners, num_clients=self.num_clients, seed=self.seed
        )

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The clients' names with partition=natural; () with another one."""
        if self.partition.name != "natural" or (found := self.owners) is None:
            return ()
        return tuple(str(found[rows[0]]) for rows in self.client_rows)

    def class_counts(self) -> Indices:
        """Return the number of examples of each class that each client holds, (N, C)."""
        labels, size = self.strata, len(self.count_names)
        return np.stack([np.bincount(labels[rows], minlength=size) for rows in self.client_rows])

    @property
    def num_natural_clients(self) -> int | None:
        """How many clients partition=natural can make, if that is known without decoding images."""
        return None

    def site_name(self, folder: Path | str | None) -> str | None:
        """Return the name that a site's own data give it, with partition=site."""
        return None

    def name_of(self, client_id: int, folder: Path | str | None) -> str | None:
        """Return a client's name, if it has one."""
        return self.client_names[client_id] if self.client_names else self.site_name(folder)

    def unseen_clients(self) -> frozenset[int]:
        """Return the ids of the clients of ``partition.unseen``, which may name them."""
        words = self.partition.unseen
        named = any(isinstance(word, str) for word in words)  # else no examples are read
        ids = {name: client for client, name in enumerate(self.client_names if named else ())}
        if unknown := [word for word in words if isinstance(word, str) and word not in ids]:
            known = f"; the clients are {', '.join(ids)}" if ids else ": the clients have no names"
            raise ConfigError(
                f"partition.unseen={list(words)}: {unknown[0]} is no client{known}; ids go from 0"
            )
        return frozenset(ids[word] if isinstance(word, str) else word for word in words)

    def require_client(self, client_id: int) -> None:
        """Reject a client that is not one of 0 to N - 1."""
        if not 0 <= client_id < self.num_clients:
            raise ConfigError(
                f"client {client_id} is not one of 0..{self.num_clients - 1}: change clients or "
                "the node's partition-id"
            )

    def held_out_of(
        self, rows: Indices, client_id: int, *, shared: bool
    ) -> tuple[Indices, Indices]:
        """Split a client's rows by ``partition.holdout``: those to train on, those held out.

        ``shared``: several clients may have a row, so nobody trains on what another holds out.
        """
        if len(rows) == 0:
            raise ConfigError(
                f"client {client_id} has no training example: fill its data (task.path, or with "
                "partition=site the node config's data-folder)"
            )
        kept, held_out = hold_out(rows, self.partition.holdout, self._holdout_seed, client_id)
        if shared:
            kept = kept[~np.isin(kept, self._held_out_twice)]
        if len(kept) == 0:
            raise ConfigError(
                f"partition.holdout={self.partition.holdout} leaves client {client_id} nothing to "
                f"train on: other clients hold out all of its {len(rows)} examples; lower it"
            )
        return kept, held_out

    @property
    def _holdout_seed(self) -> int:
        return self.seed if self.partition.seed is None else self.partition.seed

    @cached_property
    def _held_out_twice(self) -> Indices:
        """Held-out rows, if several clients share rows: nobody trains on them.

        Otherwise the global model would have seen held-out examples.
        """
        fraction, parts = self.partition.holdout, self.client_rows
        if not fraction or sum(map(len, parts)) == len(np.unique(np.concatenate(parts))):
            return np.empty(0, dtype=np.int64)
        held = [hold_out(rows, fraction, self._holdout_seed, i)[1] for i, rows in enumerate(parts)]
        return np.concatenate(held)
