"""Flower Datasets' Partitioner for flavours that draw the rows of all clients at once."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from fedhet.tasks.sources.arrays import Indices

LABEL, GROUP, ROW = "label", "group", "row"  # columns of the table that is partitioned


class RowPartitioner(Partitioner):  # type: ignore[misc]
    """A partitioner that draws the rows of all clients on the first request."""

    def __init__(self, num_partitions: int, seed: int = 0) -> None:
        super().__init__()
        self.clients = num_partitions
        self.seed = seed
        self._rows: list[Indices] | None = None

    @property
    def num_partitions(self) -> int:
        """N, the number of clients."""
        return self.clients

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the examples of one client."""
        return self.dataset.select(self.rows()[partition_id])

    def rows(self) -> list[Indices]:
        """Return the rows of every client."""
        if self._rows is None:
            self._rows = self._draw(np.asarray(self.dataset[LABEL][:]))
        return self._rows

    @abstractmethod
    def _draw(self, labels: Indices) -> list[Indices]:
        """Spread the rows of labels (n,) over the clients."""


def rows_by_class(labels: Indices) -> list[Indices]:
    """Return the rows of each class that occurs, ascending."""
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]
