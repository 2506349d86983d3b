"""Each class is spread over the clients by a Dirichlet draw (MA-Echo, FedDW; FedDF, FedPVR).

``ClassDirichletPartitioner`` is the sampling of Yurochkin et al., Bayesian Nonparametric Federated
Learning of Neural Networks, ICML 2019, https://arxiv.org/abs/1905.12022, as in MA-Echo's code: for
each class c with n_c examples, p ~ Dir(alpha) over the N clients; with balancing p_i = 0 for
clients that already hold n / N examples; client i gets n_c p_i / sum(p) of them. Everything is
redrawn until each client holds min_size. Borders are the running sums rounded down, so the last
client often gets one example of a class without a share of it, as in the published sizes.
flwr_datasets' DirichletPartitioner cannot reproduce the published partition: it takes classes in
the data set's order, fills a client past n / N by one more class, and uses another generator.

``RecutDirichletPartitioner`` is that of Lin et al., Ensemble Distillation for Robust Model Fusion
in Federated Learning, NeurIPS 2020, https://arxiv.org/abs/2006.07242, which FedPVR uses: a balanced
Dirichlet draw until every client has half of its equal share; then the clients' rows are joined
and cut into N equal pieces, so that neighbours share a class at a border. Above ten clients the
draw is made for groups of ten, each with its part of the shuffled rows.
"""

from __future__ import annotations

import numpy as np

from fedhet.common.errors import ConfigError
from fedhet.tasks.partitions.base import RowPartitioner, rows_by_class
from fedhet.tasks.sources.arrays import Indices

MAX_DRAWS = 20_000  # MA-Echo's 20 clients at alpha .01 take about 3,000, a few seconds


class ClassDirichletPartitioner(RowPartitioner):
    """Dirichlet over clients, class by class; every row goes to exactly one client.

    Args:
        num_partitions: N.
        alpha: concentration; with a small alpha few clients hold a class.
        min_size: the least number of examples of a client.
        balance: leave out clients that already hold their equal share.
        seed: the draw's seed.
    """

    def __init__(
        self,
        num_partitions: int,
        alpha: float,
        *,
        min_size: int = 10,
        balance: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(num_partitions, seed)
        self.alpha, self.min_size, self.balance = alpha, min_size, balance

    def _draw(self, labels: Indices) -> list[Indices]:
        random = np.random.RandomState(self.seed)  # as in the published partition
        classes, needed = rows_by_class(labels), self.min_size * self.clients
        if len(labels) < needed:
            raise ConfigError(
                f"partition.min_size={self.min_size} with clients={self.clients} needs {needed} "
                f"examples, but there are {len(labels)}: lower partition.min_size or clients"
            )
        for _ in range(MAX_DRAWS):
            rows = draw_class_shares(classes, self.clients, self.alpha, random, self.balance)
            if rows is not None and min(map(len, rows)) >= self.min_size:
                for client_rows in rows:
                    random.shuffle(client_rows)
                return rows
        raise ConfigError(
            f"in {MAX_DRAWS} draws some client always got fewer than partition.min_size="
            f"{self.min_size} examples, with partition.alpha={self.alpha} and clients="
            f"{self.clients}: raise partition.alpha, or lower partition.min_size or clients"
        )


class RecutDirichletPartitioner(RowPartitioner):
    """Dirichlet over clients, re-cut to n // N rows each; the last n % N rows are not used.

    ``group_size`` is the most clients of one draw.
    """

    def __init__(
        self, num_partitions: int, alpha: float, *, group_size: int = 10, seed: int = 0
    ) -> None:
        super().__init__(num_partitions, seed)
        self.alpha, self.group_size = alpha, group_size

    def _draw(self, labels: Indices) -> list[Indices]:
        random = np.random.RandomState(self.seed)
        shuffled = random.permutation(len(labels))
        starts = range(0, self.clients, self.group_size)
        borders = [start * len(labels) // self.clients for start in starts][1:]
        line: list[Indices] = []
        for start, rows in zip(starts, np.split(shuffled, borders), strict=True):
            clients = min(self.group_size, self.clients - start)
            line += self._draw_group(rows, labels, clients, random)
        size = len(labels) // self.clients
        joined = np.concatenate(line)
        return [joined[client * size : (client + 1) * size] for client in range(self.clients)]

    def _draw_group(
        self, rows: Indices, labels: Indices, clients: int, random: np.random.RandomState
    ) -> list[Indices]:
        classes = [rows[labels[rows] == label] for label in np.unique(labels[rows])]
        half_share = len(rows) // (2 * clients)
        for _ in range(MAX_DRAWS):
            parts = draw_class_shares(classes, clients, self.alpha, random, balance=True)
            if parts is not None and min(map(len, parts)) >= half_share:
                return parts
        raise ConfigError(
            f"in {MAX_DRAWS} draws some client always got less than half of its share, with "
            f"partition.alpha={self.alpha} and clients={self.clients} in groups of {clients}: "
            "raise partition.alpha, or lower clients or partition.group_size"
        )


def draw_class_shares(
    classes: list[Indices],
    num_clients: int,
    alpha: float,
    random: np.random.RandomState,
    balance: bool,
) -> list[Indices] | None:
    """Spread each class over the clients once; None if a tiny alpha left one without a client."""
    fair_share = sum(map(len, classes)) / num_clients
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    sizes = np.zeros(num_clients)
    for rows in classes:
        rows = rows.copy()
        random.shuffle(rows)
        shares = random.dirichlet(np.full(num_clients, alpha))
        if balance:
            shares = shares * (sizes < fair_share)
        total = shares.sum()
        if not total > 0:  # also for NaN
            return None
        borders = (np.cumsum(shares / total) * len(rows)).astype(np.int64)[:-1]
        for client, part in enumerate(np.split(rows, borders)):
            parts[client].append(part)
            sizes[client] += len(part)
    return [np.concatenate(client_parts) for client_parts in parts]
