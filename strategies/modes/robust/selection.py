"""Krum, Multi-Krum and Bulyan: the mean of the clients that are closest to most others.

Krum, Multi-Krum    Blanchard, El Mhamdi, Guerraoui, Stainer. NeurIPS 2017.
                    https://arxiv.org/abs/1703.02757
Bulyan              El Mhamdi, Guerraoui, Rouault. ICML 2018. https://arxiv.org/abs/1802.07927

A client's score is the sum of its squared distances to the n - f - 2 clients closest to it; f of
the n clients may be hostile. Krum takes the client with the least score, Multi-Krum the plain mean
of the m clients with the least scores. Bulyan takes theta = n - 2 f clients by Krum, one after the
other from the rest, and then at every coordinate the mean of the theta - 2 f values closest to the
chosen clients' median. (Its paper does not say what Krum does when fewer than f + 3 clients are
left; here, as in Flower, a score then has one neighbour. The last picks are then ties: the two
clients closest to each other have the same least score, and the one with the lower number is taken.
Flower's Bulyan takes all theta from one list of scores.)

Distances compare whole replies (coordinates.py): the update, and the payloads scaled to it. So the
rules also leave out a client that lies only in a payload. All groups of a chosen client count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.common.kinds import Count, Whole
from fedhet.strategies.base import Tensors
from fedhet.strategies.modes.robust.aggregator import Groups, RobustAggregator, weighted_mean
from fedhet.strategies.modes.robust.coordinates import blocks_of, joint_distances


class Krum(RobustAggregator):
    """The reply of the client that is closest to most others; needs 2 f + 3 replies."""

    option = "krum"

    attackers: Whole = 1
    """f, how many clients of a round may be hostile"""

    @property
    def least_vectors(self) -> int:
        """2 f + 3."""
        return 2 * self.attackers + 3

    @property
    def assumption(self) -> str:
        """The assumed f."""
        return f" with attackers={self.attackers}"

    def choose(self, distances: Tensor) -> list[int]:
        """Return which clients are chosen, by their squared distances (n, n)."""
        return closest(distances, self.attackers)[:1]

    def combine_chosen(self, vectors: Sequence[Tensors]) -> dict[str, Tensor]:
        """Return the mean of the chosen clients' tensors."""
        return weighted_mean(vectors, [1.0 / len(vectors)] * len(vectors))

    def combine_groups(
        self, groups: Groups, params: Tensors, round: int
    ) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
        """Return the chosen clients' means; the others do not count."""
        distances = joint_distances(groups, self.attackers)
        chosen = sorted(self.choose(distances))
        means = {
            name: self.combine_chosen([vectors[i] for i in chosen])
            for name, vectors in groups.items()
        }
        return means, [float(i in chosen) for i in range(len(distances))]


class MultiKrum(Krum):
    """The mean of the m clients that are closest to most others; needs 2 f + 3 replies."""

    option = "multi_krum"

    select: Count | None = None
    """m, how many clients count; null: n - f - 2"""

    @property
    def least_vectors(self) -> int:
        """2 f + 3, and m."""
        return max(super().least_vectors, self.select or 0)

    def choose(self, distances: Tensor) -> list[int]:
        """Return the m clients with the least scores."""
        most = len(distances) - self.attackers - 2 if self.select is None else self.select
        return closest(distances, self.attackers)[:most]


class Bulyan(Krum):
    """Krum's clients one after the other, then a trimmed mean about their median; needs 4 f + 3
    replies.
    """

    option = "bulyan"

    @property
    def least_vectors(self) -> int:
        """4 f + 3."""
        return 4 * self.attackers + 3

    def choose(self, distances: Tensor) -> list[int]:
        """Return theta = n - 2 f clients."""
        left, chosen = list(range(len(distances))), list[int]()
        while len(chosen) < len(distances) - 2 * self.attackers:
            best = closest(distances[left][:, left], self.attackers)[0]
            chosen.append(left.pop(best))
        return chosen

    def combine_chosen(self, vectors: Sequence[Tensors]) -> dict[str, Tensor]:
        """Return at every coordinate the mean of the values closest to the median."""
        kept, found = len(vectors) - 2 * self.attackers, {}
        for name, like in vectors[0].items():
            mean = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
            for block, values in blocks_of(vectors, name):
                values = values.double()
                median = values.quantile(0.5, dim=0)
                order = (values - median).abs().argsort(dim=0, stable=True)[:kept]
                mean[block] = values.gather(0, order).mean(0).to(like.dtype)
            found[name] = mean.reshape(like.shape)
        return found


def closest(distances: Tensor, attackers: int) -> list[int]:
    """Return the clients by score, least first, then by number; ``distances`` are squared."""
    neighbours = max(1, len(distances) - attackers - 2)
    scores = distances.sort(dim=1).values[:, 1 : neighbours + 1].sum(1)
    return [int(i) for i in scores.argsort(stable=True)]
