"""Every client has its own prior over classes (FedMRUR): Dirichlet or a few classes.

After Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019, https://arxiv.org/abs/1909.06335, as FL-Simulator draws it. All clients get
n // N rows. Row by row, a random client with room left draws a class from its prior and takes that
class's next row; a class that has run out starts again. So several clients, or none, may
have a row, and a client may have it twice: this is not a partition in the strict sense.

flwr_datasets' PathologicalPartitioner also gives each client random classes, but shares each class
among its holders: no row twice, unequal sizes, and a class that nobody drew is left out.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError
from fedhet.tasks.partitions.base import RowPartitioner, rows_by_class
from fedhet.tasks.sources.arrays import Indices


class ClassPriorPartitioner(RowPartitioner):
    """Equal sizes; the classes are drawn from a prior of each client."""

    @abstractmethod
    def draw_priors(self, num_classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return each client's probabilities of the classes (N, C)."""

    def _draw(self, labels: Indices) -> list[Indices]:
        rng = np.random.default_rng(self.seed)
        classes = [rng.permutation(rows) for rows in rows_by_class(labels)]
        size = len(labels) // self.clients
        priors = self.draw_priors(len(classes), rng)
        drawn = np.concatenate(  # the classes of each client's places in turn
            [rng.choice(len(classes), size=size, p=prior) for prior in priors]
        )
        order = rng.permutation(self.clients * size)  # the order in which places are filled
        rows = np.empty(self.clients * size, dtype=np.int64)
        for label, pool in enumerate(classes):
            places = order[drawn[order] == label]
            rows[places] = pool[np.arange(len(places)) % len(pool)]
        return list(rows.reshape(self.clients, size))


class ClassPriorDirichletPartitioner(ClassPriorPartitioner):
    """The priors are draws from a Dirichlet over the classes; small alpha: few per client."""

    def __init__(self, num_partitions: int, alpha: float, *, seed: int = 0) -> None:
        super().__init__(num_partitions, seed)
        self.alpha = alpha

    def draw_priors(self, num_classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw from the Dirichlet."""
        return rng.dirichlet(np.full(num_classes, self.alpha), size=self.clients)


class FewClassesPartitioner(ClassPriorPartitioner):
    """The priors are uniform over as many classes as ``classes`` says, chosen as ``mode`` says."""

    def __init__(
        self, num_partitions: int, classes: int, mode: str = "random", *, seed: int = 0
    ) -> None:
        super().__init__(num_partitions, seed)
        self.classes, self.mode = classes, mode

    def draw_priors(self, num_classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Choose the classes of each client."""
        if self.classes > num_classes:
            raise ConfigError(
                f"partition.classes={self.classes} is more than the task's {num_classes} classes"
            )
        priors = np.zeros((self.clients, num_classes))
        for client, prior in enumerate(priors):
            prior[self._choose(client, num_classes, rng)] = 1 / self.classes
        return priors

    def _choose(self, client: int, num_classes: int, rng: np.random.Generator) -> Indices:
        """Return a client's classes."""
        following = (client + np.arange(num_classes)) % num_classes
        given = {"random": 0, "first-deterministic": 1, "deterministic": self.classes}[self.mode]
        others = rng.choice(np.sort(following[given:]), self.classes - given, replace=False)
        return np.concatenate([following[:given], others])
