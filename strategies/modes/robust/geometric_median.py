"""The geometric median of the clients' updates, by smoothed Weiszfeld iterations (RFA).

Pillutla, Kakade, Harchaoui. IEEE Trans. Signal Processing 2022. https://arxiv.org/abs/1912.13445

    min_z sum_i a_i ||z - v_i||:
    z <- sum_i b_i v_i / sum_i b_i,   b_i = a_i / max(nu, ||z - v_i||)

All z are means of the v_i, so the iterations run on the weights, and read only the distances
between clients. The paper weighs clients by examples, starts at z = sum_i a_i v_i and stops after 3
iterations, because each is a round of secure sums. Here a_i = 1 / n, and they run until no weight
changes by more than a share ``tolerance``. (The sum of distances would be no measure: a far client
dominates it.) They start at the client whose nearest majority is nearest: from the mean, a far
client's weight falls too slowly if nearly half of the clients are as far. Each payload has its own
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedhet.common.kinds import Count, NotNegative, Positive
from fedhet.strategies.base import Tensors
from fedhet.strategies.modes.robust.aggregator import (
    Combined,
    RobustAggregator,
    counted,
    weighted_mean,
)
from fedhet.strategies.modes.robust.coordinates import squared_distances


class GeometricMedian(RobustAggregator):
    """The point of least summed distance to all updates (RFA)."""

    option = "geometric_median"

    iterations: Count = 100
    """the most iterations of Weiszfeld"""
    smoothing: Positive = 1e-6
    """nu: smaller distances count as nu, so that nothing is divided by 0"""
    tolerance: NotNegative = 1e-6
    """stop when no weight changes by a larger share"""

    def mean(self, group: str, vectors: Sequence[Tensors]) -> Combined:
        """Return the geometric median."""
        weights = self.weights(squared_distances(vectors))
        return weighted_mean(vectors, weights), counted(weights)

    def weights(self, distances: Tensor) -> list[float]:
        """Return the clients' weights (n,) by their squared distances (n, n)."""
        weights = self._start(distances)
        for _ in range(self.iterations):
            to_mean = distances @ weights - 0.5 * weights @ distances @ weights
            last, weights = weights, self._pulls(to_mean.clamp_min(0.0).sqrt(), self.smoothing)
            if float(((weights - last).abs() / weights).max()) <= self.tolerance:
                break
        return [float(weight) for weight in weights]

    def _start(self, distances: Tensor) -> Tensor:
        """Return the pulls at the client whose nearest majority is nearest, none above theirs."""
        majority = distances.kthvalue(len(distances) // 2 + 1).values
        start = int(majority.argmin())
        reach = max(float(majority[start].sqrt()), self.smoothing)
        return self._pulls(distances[start].sqrt(), reach)

    @staticmethod
    def _pulls(lengths: Tensor, least: float) -> Tensor:
        pulls = 1.0 / lengths.clamp_min(least)
        return pulls / pulls.sum()
