"""The Dirichlet partition with equal sizes of FedDF, which FedPVR uses.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
https://arxiv.org/abs/2006.07242. Each class is spread over the clients by a Dirichlet draw with
balancing until every client has half of its equal share; then the clients' rows are laid end to end
and cut into N equal pieces, so that neighbours share what crosses a border. Above ten clients the
draw is made for groups of ten, each with its part of the shuffled rows.
"""

from __future__ import annotations

import numpy as np

from common.errors import ConfigError
from tasks.partitions.base import LABEL, RowPartitioner
from tasks.partitions.dirichlet import MAX_DRAWS, draw_class_shares
from tasks.sources.arrays import Indices


class RecutDirichletPartitioner(RowPartitioner):
    """Dirichlet over clients, re-cut to n // N rows each; the n % N last rows are not used.

    Args:
        num_partitions: N, the number of clients.
        alpha: concentration; small: few classes a client.
        group_size: the most clients that a draw is made for.
        seed: of the draw.
        partition_by: the column with the labels.
    """

    def __init__(
        self,
        num_partitions: int,
        alpha: float,
        *,
        group_size: int = 10,
        seed: int = 0,
        partition_by: str = LABEL,
    ) -> None:
        super().__init__(num_partitions, partition_by)
        self.alpha = alpha
        self.group_size = group_size
        self._random = np.random.RandomState(seed)

    def _draw(self, labels: Indices) -> list[Indices]:
        shuffled = self._random.permutation(len(labels))
        clients = self._num_partitions
        starts = range(0, clients, self.group_size)
        borders = [start * len(labels) // clients for start in starts][1:]
        line: list[Indices] = []
        for start, rows in zip(starts, np.split(shuffled, borders), strict=True):
            line += self._draw_group(rows, labels, min(self.group_size, clients - start))
        size = len(labels) // clients
        joined = np.concatenate(line)
        return [joined[client * size : (client + 1) * size] for client in range(clients)]

    def _draw_group(self, rows: Indices, labels: Indices, clients: int) -> list[Indices]:
        classes = [rows[labels[rows] == label] for label in np.unique(labels[rows])]
        half_share = len(rows) // (2 * clients)
        for _ in range(MAX_DRAWS):
            parts = draw_class_shares(classes, clients, self.alpha, self._random, balance=True)
            if parts is not None and min(map(len, parts)) >= half_share:
                return parts
        raise ConfigError(
            f"in {MAX_DRAWS} draws some client always got less than half of its share, with "
            f"partition.alpha={self.alpha} and clients={self._num_partitions} in groups of "
            f"{clients}: raise partition.alpha, or lower clients or partition.group_size"
        )
