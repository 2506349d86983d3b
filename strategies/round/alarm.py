"""The alarm: clients with an unusually large update or payload.

The alarm reads only norms. The server knows them for every reply that it receives singly, kept or
only added up (under central privacy it shows none). A payload that is a sum over a client's
examples counts per example. A robust z-score, with the median and the median absolute deviation
(Iglewicz and Hoaglin 1993):

    z_i = (||u_i|| - median) / max(1.4826 MAD, median / 2)

z > 6 raises the alarm, so the update is at least four times as long as the median. On non-IID data
an honest client's update can be, too (docs/robust.md). The alarm misses turned signs, numbers that
are too small, and lies within the spread of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedhet.strategies.base import Reply
from fedhet.strategies.wire.records import UPDATE

LEAST = 4  # replies: one of three may well be far from the two others
LIMIT = 6.0
_MAD = 1.4826  # MAD of a normal distribution in its standard deviations, inverse
_FLOOR = 0.5


def standing_out(replies: Sequence[Reply]) -> dict[int, dict[str, float]]:
    """Return z above the limit by client id, and by what stands out: the update, or a payload.

    ``replies`` have norms.
    """
    lengths = {UPDATE: {reply.client_id: reply.norm for reply in replies}}
    for reply in replies:
        for name, norm in reply.payload_norms.items():
            each = reply.num_examples if name in reply.per_example else 1
            lengths.setdefault(name, {})[reply.client_id] = norm / each
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
