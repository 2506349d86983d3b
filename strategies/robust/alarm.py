"""The alarm: clients whose update is far longer than the others'.

Only the updates' norms are read, which are known of every reply that the server receives on its
own, kept or only added up. A robust z-score, with the median and the median absolute deviation
(Iglewicz and Hoaglin 1993):

    z_i = (||u_i|| - median) / max(1.4826 MAD, median / 2)

z > 6 raises the alarm, so the update is at least four times as long as the median. On non-IID data
an honest client's can be, too (docs/robust.md). Turned signs, or an update that hides
within the spread of the others, are not seen by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedhet.strategies.base import Reply

LEAST = 4  # replies; of three, one may well be far from the two others
LIMIT = 6.0
_MAD = 1.4826  # MAD of a normal distribution in its standard deviations, inverse
_FLOOR = 0.5


def standing_out(replies: Sequence[Reply]) -> dict[int, float]:
    """Return z by client id of the clients above the limit; ``replies`` have norms."""
    if len(replies) < LEAST:
        return {}
    norms = [reply.norm for reply in replies]
    median = statistics.median(norms)
    spread = _MAD * statistics.median(abs(norm - median) for norm in norms)
    scale = max(spread, _FLOOR * median)
    scores = {
        reply.client_id: (norm - median) / scale if scale > 0.0 else 0.0
        for reply, norm in zip(replies, norms, strict=True)
    }
    return {client: z for client, z in scores.items() if z > LIMIT}
