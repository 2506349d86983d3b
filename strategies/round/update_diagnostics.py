"""Update diagnostics: how far the clients' updates agree, as scalars of every round.

With D_i = y_i - x the update of client i in S, over all trainable shared tensors as one vector, and
w_i its weight in the aggregate, sum_i w_i = 1 (1 / |S| for a plain mean):

    norm_ratio       ||sum_i w_i D_i|| / sum_i w_i ||D_i||, FedMRUR's 1 / d_t (its Theorem 1): 1
                     where all point the same way, 1 / sqrt(|S|) where they are orthogonal, of one
                     length and weight
    update_cosine    the mean of cos(D_i, D_j) over all pairs i != j, each weighted by
                     w_i w_j ||D_i|| ||D_j||: 0 where they are orthogonal
    drift_diversity  sum_i ||w_i D_i||^2 / ||sum_i w_i D_i||^2 (FedPVR, Definition 1, for equal
                     weights): sum_i w_i^2 where all are equal, 1 where they are orthogonal
    update_norm      sum_i w_i ||D_i||
    step_norm        ||Delta||, of the aggregate

All follow from the sum and the norms, so the server need not keep updates. Undefined figures are
left out: the cosine of a single client or beside an update that dwarfs all others, a quotient by a
zero norm. :func:`diagnose_layers` has drift_diversity and update_norm by tensor (FedPVR, Figures 2,
4).

The alarm (:func:`standing_out`) names clients with an unusually large update or payload. It reads
only norms, which the server knows for every reply that it receives singly, kept or only added up
(under central privacy it shows none). A payload that is a sum over a client's examples counts per
example. A robust z-score, with the median and the median absolute deviation (Iglewicz and Hoaglin
1993):

    z_i = (||u_i|| - median) / max(1.4826 MAD, median / 2)

z > 6 raises the alarm, so the update is at least four times as long as the median. On non-IID data
an honest client's update can be, too (docs/robust.md). The alarm misses turned signs, numbers that
are too small, and lies within the spread of the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from fedhet.strategies.base import Reply, ReplySum, Tensors
from fedhet.strategies.round.exact_sum import norms_of
from fedhet.strategies.wire.records import UPDATE

LEAST = 4  # replies: one of three may well be far from the two others
LIMIT = 6.0
_MAD = 1.4826  # MAD of a normal distribution in its standard deviations, inverse
_FLOOR = 0.5
_RESOLVED = 1e-4  # of the squares: the least products of pairs that float32 updates resolve


def norm(tensors: Tensors) -> float:
    """Return the L2 norm of all tensors as one vector; 0 without tensors."""
    return length_of(norms_of(tensors))


def length_of(norms: Mapping[str, float]) -> float:
    """Return the L2 norm of all tensors as one vector, given that of each."""
    return math.sqrt(math.fsum(length**2 for length in norms.values()))


def diagnose(total: ReplySum, update: Tensors) -> dict[str, float]:
    """Return the figures above for a round's replies and Delta; empty if nothing is shared."""
    if not total.update:
        return {}
    pairs = zip(total.weights, total.replies, strict=True)
    lengths = [weight * reply.norm for weight, reply in pairs]
    mean, of_sum = math.fsum(lengths), norm(total.update)
    squares = math.fsum(length**2 for length in lengths)
    figures: dict[str, float] = {}
    if mean > 0.0:
        figures["norm_ratio"] = of_sum / mean
    if of_sum > 0.0:
        figures["drift_diversity"] = squares / of_sum**2
    # ||sum of vectors||^2 is the sum of their squares and the products of all pairs
    if (products := mean**2 - squares) > _RESOLVED * squares:
        figures["update_cosine"] = (of_sum**2 - squares) / products
    same = update.keys() == total.update.keys() and all(
        update[name] is value for name, value in total.update.items()
    )
    step = of_sum if same else norm(update)
    return figures | {"update_norm": mean, "step_norm": step}


def diagnose_layers(total: ReplySum, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return "drift_diversity" and "update_norm" of each tensor on its own, by its name."""
    figures: dict[str, dict[str, float]] = {"drift_diversity": {}, "update_norm": {}}
    for name in names:
        pairs = zip(total.weights, total.replies, strict=True)
        lengths = [weight * reply.norms.update[name] for weight, reply in pairs]
        if of_sum := norm({name: total.update[name]}):
            squares = math.fsum(length**2 for length in lengths)
            figures["drift_diversity"][name] = squares / of_sum**2
        figures["update_norm"][name] = math.fsum(lengths)
    return figures


def step_norm(total: ReplySum, update: Tensors) -> dict[str, float]:
    """Return what is known without single replies: the norm of Delta."""
    return {"step_norm": norm(update)} if update else {}


def standing_out(replies: Sequence[Reply]) -> dict[int, dict[str, float]]:
    """Return z above the limit by client id, and by what stands out: the update, or a payload.

    ``replies`` have norms.
    """
    lengths = {UPDATE: {reply.client_id: reply.norm for reply in replies}}
    for reply in replies:
        for name, length in reply.norms.payloads.items():
            each = reply.num_examples if name in reply.per_example else 1
            lengths.setdefault(name, {})[reply.client_id] = length / each
    found: dict[int, dict[str, float]] = {}
    for name, norms in lengths.items():
        for client, z in _outliers(norms).items():
            found.setdefault(client, {})[name] = z
    return found


def _outliers(norms: Mapping[int, float]) -> dict[int, float]:
    if len(norms) < LEAST:
        return {}
    median = statistics.median(norms.values())
    spread = _MAD * statistics.median(abs(norm - median) for norm in norms.values())
    scale = max(spread, _FLOOR * median)
    if scale == 0.0:
        return {}
    scores = {client: (norm - median) / scale for client, norm in norms.items()}
    return {client: z for client, z in scores.items() if z > LIMIT}
