"""Flower Datasets' Partitioner over rows that are drawn once."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from tasks.sources.arrays import Indices

LABEL, GROUP, ROW = "label", "group", "row"


class RowPartitioner(Partitioner):  # type: ignore[misc]
    """A partitioner that draws the rows of all clients at the first request.

    Args:
        num_partitions: N, the number of clients.
        partition_by: the column with the labels, from 0.
    """

    def __init__(self, num_partitions: int, partition_by: str = LABEL) -> None:
        super().__init__()
        self._num_partitions = num_partitions
        self._partition_by = partition_by
        self._rows: list[Indices] | None = None

    @property
    def num_partitions(self) -> int:
        """N, the number of clients."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the examples of one client."""
        return self.dataset.select(self.rows()[partition_id])

    def rows(self) -> list[Indices]:
        """Return the rows of every client."""
        if self._rows is None:
            self._rows = self._draw(np.asarray(self.dataset[self._partition_by][:]))
        return self._rows

    @abstractmethod
    def _draw(self, labels: Indices) -> list[Indices]:
        """Spread the rows of labels (n,) over the clients."""


def rows_by_class(labels: Indices) -> list[Indices]:
    """Return the rows of each class that occurs, ascending."""
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]
