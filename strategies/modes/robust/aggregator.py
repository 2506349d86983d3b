"""RobustAggregator: the base of the aggregators that a few hostile clients cannot steer.

Such an aggregator replaces the whole sum of a round's replies. So it also protects the server
halves of a method, which read sums of payloads. A reply has several groups of tensors: the
update, the buffers and each payload that is summed (SCAFFOLD's change of c_i, class sums). The same
rule acts on every group; a payload's sum becomes the number of clients times its robust mean.

Every client counts the same, because its number of examples is its own claim.

Bucketing   Karimireddy, He, Jaggi. ICLR 2022. https://arxiv.org/abs/2006.09365
The replies are put into buckets of s at random, and the rule sees the mean of each bucket: on
non-IID data these differ less than clients do. Up to f buckets have a hostile member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedhet.common.configured import Option, Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Seed
from fedhet.strategies.base import Reads, Reply, ReplySum, Tensors
from fedhet.strategies.slots import CombinesReplies, Output, reads_of

KEY = "strategy.aggregator"
UPDATE, BUFFERS = "update", ":buffers"  # groups beside those with a payload's name
Groups = Mapping[str, Sequence[Tensors]]  # by name, a tensor mapping of each client (or bucket)
Combined = tuple[dict[str, Tensor], list[float]]  # robust mean, and how far each client counts

_STREAM = 0xB0C  # keeps buckets independent of every other use of the run's seed


class RobustAggregator(Option, CombinesReplies):
    """Replaces the sum of a round's replies; the server keeps all of them for it.

    A subclass has :meth:`mean`, for one group, or :meth:`combine_groups`, for all together.
    """

    group = "strategy/aggregator"
    reads = Reads.REPLIES

    bucket_size: Count = 1
    """s: the rule sees the means of s replies each; 1: no buckets"""
    seed: Annotated[Seed, Refers("${seed}")] = 0
    """seed of the buckets"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.trust = {}

    # ---- what a rule has ---------------------------------------------------------------------

    @property
    def least_vectors(self) -> int:
        """How many clients (or buckets) the rule needs."""
        return 1

    def mean(self, group: str, vectors: Sequence[Tensors]) -> Combined:
        """Return the robust mean of a group, and how far each of its vectors counts."""
        raise NotImplementedError

    def combine_groups(
        self, groups: Groups, params: Tensors, round: int
    ) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
        """Return the robust mean of every group, and how far each client (or bucket) counts."""
        found = {name: self.mean(name, vectors) for name, vectors in groups.items()}
        trusts = [trust for _, trust in found.values()]
        return {name: mean for name, (mean, _) in found.items()}, [
            min(trust) for trust in zip(*trusts, strict=True)
        ]

    # ---- checks ------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """How many replies a round needs."""
        return (self.least_vectors - 1) * self.bucket_size + 1

    def check_cohort(self, num_clients: int, most: int) -> None:
        """Refuse rounds of at most ``most`` of the ``num_clients`` clients, if that is too few."""
        if most < self.least:
            buckets = f" with bucket_size={self.bucket_size}" if self.bucket_size > 1 else ""
            raise ConfigError(
                f"{KEY} {type(self).__name__}{self.assumption}{buckets} needs {self.least} replies "
                f"a round, and of the {num_clients} clients at most {most} take part "
                "(participation): raise clients or participation, or lower what it assumes"
            )

    @property
    def assumption(self) -> str:
        """The words about the assumed attackers in errors."""
        return ""

    def check_method(self, payloads: Sequence[str], output: Output) -> None:
        """Refuse an output that is made of single models."""
        if reads_of(output) != Reads.SUM:
            raise ConfigError(
                f"strategy.output {type(output).__name__} is made of the clients' single models, "
                f"which {KEY} {type(self).__name__} does not protect: set strategy/output=latest, "
                "or choose another method"
            )

    # ---- the round ---------------------------------------------------------------------------

    def combine(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], round: int
    ) -> ReplySum:
        """Return the sum that all parts read instead of ``total``, which is that of the replies."""
        groups = {UPDATE: [reply.update for reply in replies]}
        groups |= {BUFFERS: [reply.buffers for reply in replies]}
        groups |= {name: [reply.payloads[name] for reply in replies] for name in total.payloads}
        buckets = self._buckets(len(replies), round)
        bucketed = {
            name: [_mean_of([vectors[i] for i in bucket]) for bucket in buckets]
            for name, vectors in groups.items()
            if vectors[0]
        }
        means, trusts = self.combine_groups(bucketed, params, round) if bucketed else ({}, [])
        self.trust = {
            replies[i].client_id: trust
            for bucket, trust in zip(buckets, trusts or [1.0] * len(buckets), strict=True)
            for i in bucket
        }
        sums = {
            name: {key: len(replies) * value for key, value in means.get(name, {}).items()}
            for name in total.payloads
        }
        update, buffers = means.get(UPDATE, {}), means.get(BUFFERS, {})
        weights = [1.0 / len(replies)] * len(replies)
        return replace(total, weights=weights, update=update, payloads=sums, buffers=buffers)

    def _buckets(self, count: int, round: int) -> list[list[int]]:
        size = self.bucket_size
        if size == 1:
            return [[i] for i in range(count)]
        order = np.random.default_rng([_STREAM, self.seed, round]).permutation(count).tolist()
        return [sorted(order[start : start + size]) for start in range(0, count, size)]


def weighted_mean(vectors: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return sum_i w_i v_i by name, added in double precision."""
    found = {}
    for name, like in vectors[0].items():
        total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        for vector, weight in zip(vectors, weights, strict=True):
            if weight != 0.0:
                total.add_(vector[name].double(), alpha=weight)
        found[name] = total.to(like.dtype)
    return found


def counted(weights: Sequence[float]) -> list[float]:
    """Return how far clients of these weights count, beside the plain mean's 1 / n."""
    return [min(1.0, weight * len(weights)) for weight in weights]


def _mean_of(vectors: Sequence[Tensors]) -> Tensors:
    single = len(vectors) == 1
    return vectors[0] if single else weighted_mean(vectors, [1.0 / len(vectors)] * len(vectors))
