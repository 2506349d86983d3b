"""Disjoint classes: no two clients have a class in common (MA-Echo, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedhet.common.errors import ConfigError
from fedhet.tasks.partitions.base import RowPartitioner
from fedhet.tasks.sources.arrays import Indices

KEY = "partition.sets"


class DisjointClassesPartitioner(RowPartitioner):
    """Each client holds all examples of its classes.

    Args:
        num_partitions: N.
        sets: the classes of each client, by label; other classes are left out. None: all classes,
            dealt out at random, as evenly as possible.
        seed: of the random deal.
    """

    def __init__(
        self, num_partitions: int, sets: Sequence[Sequence[int]] | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(num_partitions, seed)
        self.sets = None if sets is None else [[int(label) for label in held] for held in sets]
        if self.sets is None:
            return
        if len(self.sets) != num_partitions:
            raise ConfigError(
                f"{KEY} has {len(self.sets)} lists of classes and clients={num_partitions}: give "
                "each client one"
            )
        listed = [label for held in self.sets for label in held]
        if twice := sorted({label for label in listed if listed.count(label) > 1}):
            raise ConfigError(f"{KEY} names the classes {twice} more than once: name each once")

    def _draw(self, labels: Indices) -> list[Indices]:
        present = np.unique(labels)
        sets = self._deal(present) if self.sets is None else self.sets
        for client, held in enumerate(sets):
            if not set(held) & set(present.tolist()):
                raise ConfigError(
                    f"{KEY} gives client {client} the classes {held}, which have no examples; the "
                    f"classes are {present.tolist()}"
                )
        return [np.flatnonzero(np.isin(labels, held)) for held in sets]

    def _deal(self, present: Indices) -> list[list[int]]:
        if self.clients > len(present):
            raise ConfigError(
                f"clients={self.clients} is more than the {len(present)} classes, and with "
                "partition=disjoint_classes each client needs one: lower clients, or choose "
                "another partition"
            )
        drawn = np.random.default_rng(self.seed).permutation(present)
        return [sorted(part.tolist()) for part in np.array_split(drawn, self.clients)]
