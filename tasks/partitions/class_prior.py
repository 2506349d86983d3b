"""Every client has its own prior over classes (FedMRUR): Dirichlet or a few classes.

After Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019, https://arxiv.org/abs/1909.06335, as FL-Simulator draws it. All clients get
n // N rows. Row by row a random client with room left draws a class from its prior and takes that
class's next row; a class that has run out starts again from its first. So rows can be with several
clients, or twice with one, and others with none: this is no partition in the strict sense.

flwr_datasets' PathologicalPartitioner also gives each client n random classes, but shares each
class among its holders: no row twice, sizes unequal, and a class that nobody drew is left out.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from tasks.partitions.base import LABEL, RowPartitioner, rows_by_class
from tasks.sources.arrays import Indices


class ClassPriorPartitioner(RowPartitioner):
    """Equal sizes, classes drawn from a prior of each client.

    Args:
        num_partitions: N, the number of clients.
        seed: of the draw.
        partition_by: the column with the labels.
    """

    def __init__(self, num_partitions: int, *, seed: int = 0, partition_by: str = LABEL) -> None:
        super().__init__(num_partitions, partition_by)
        self._rng = np.random.default_rng(seed)

    @abstractmethod
    def draw_priors(self, num_classes: int) -> NDArray[np.float64]:
        """Return each client's probabilities of the classes (N, C)."""

    def _draw(self, labels: Indices) -> list[Indices]:
        classes = [self._rng.permutation(rows) for rows in rows_by_class(labels)]
        clients = self._num_partitions
        size = len(labels) // clients
        priors = self.draw_priors(len(classes))
        drawn = np.concatenate(  # the classes of each client's places in turn
            [self._rng.choice(len(classes), size=size, p=prior) for prior in priors]
        )
        order = self._rng.permutation(clients * size)  # in which the places are filled
        rows = np.empty(clients * size, dtype=np.int64)
        for label, pool in enumerate(classes):
            places = order[drawn[order] == label]
            rows[places] = pool[np.arange(len(places)) % len(pool)]
        return list(rows.reshape(clients, size))


class ClassPriorDirichletPartitioner(ClassPriorPartitioner):
    """The priors are draws from a Dirichlet over the classes.

    Args:
        num_partitions: N, the number of clients.
        alpha: concentration; small: few classes a client.
        seed: of the draw.
        partition_by: the column with the labels.
    """

    def __init__(
        self, num_partitions: int, alpha: float, *, seed: int = 0, partition_by: str = LABEL
    ) -> None:
        super().__init__(num_partitions, seed=seed, partition_by=partition_by)
        self.alpha = alpha

    def draw_priors(self, num_classes: int) -> NDArray[np.float64]:
        """Draw from the Dirichlet."""
        return self._rng.dirichlet(np.full(num_classes, self.alpha), size=self._num_partitions)


class FewClassesPartitioner(ClassPriorPartitioner):
    """The priors give some random classes the same probability and the others none.

    Args:
        num_partitions: N, the number of clients.
        classes: the number of classes of each client.
        seed: of the draw.
        partition_by: the column with the labels.
    """

    def __init__(
        self, num_partitions: int, classes: int, *, seed: int = 0, partition_by: str = LABEL
    ) -> None:
        super().__init__(num_partitions, seed=seed, partition_by=partition_by)
        self.classes = classes

    def draw_priors(self, num_classes: int) -> NDArray[np.float64]:
        """Choose the classes of each client."""
        if self.classes > num_classes:
            raise ConfigError(
                f"partition.classes={self.classes} is more than the task's {num_classes} classes"
            )
        priors = np.zeros((self._num_partitions, num_classes))
        for prior in priors:
            prior[self._rng.choice(num_classes, self.classes, replace=False)] = 1 / self.classes
        return priors
