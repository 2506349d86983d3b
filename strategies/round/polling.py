"""How long to pause between two looks for replies."""

from __future__ import annotations

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 3.0
_SHARE = 0.05  # of the time waited so far: the most by which a pause lengthens a round


def pause(waited: float) -> float:
    """Return the seconds to pause after so many seconds in vain."""
    return min(max(_SHARE * waited, _SHORTEST_SECONDS), _LONGEST_SECONDS)
