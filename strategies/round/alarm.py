"""The alarm: clients whose update, or a payload of theirs, is far longer than the others'.

Only norms are read, which are known of every reply that the server receives on its own, kept or
only added up (central privacy shows none); those of payloads that are sums over a client's
examples, for each example. A robust z-score, with the median and the median absolute deviation
(Iglewicz and Hoaglin 1993):

    z_i = (||u_i|| - median) / max(1.4826 MAD, median / 2)

z > 6 raises the alarm, so the update is at least four times as long as the median. On non-IID data
an honest client's can be, too (docs/robust.md). Turned signs, numbers that are too small, or a lie
that hides within the spread of the others, are not seen by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedhet.strategies.base import Reply
from fedhet.strategies.wire.records import UPDATE

LEAST = 4  # replies; of three, one may well be far from the two others
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
