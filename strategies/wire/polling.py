"""How long to pause between two looks for replies, and which replies to leave."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.serverapp import Grid

# Each look costs the SuperLink CPU time; a site looks for work every 3 s.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.25, 3.0
_SHARE = 0.05  # of the time waited so far: the most by which a pause lengthens a round


def pause(waited: float) -> float:
    """Return the seconds to pause after so many seconds in vain."""
    return min(max(_SHARE * waited, _SHORTEST_SECONDS), _LONGEST_SECONDS)


def give_up(grid: Grid, message_ids: Iterable[str]) -> None:
    """Tell a grid that pulls replies ahead (common/flower/arriving_replies.py) to leave these."""
    if (told := getattr(grid, "give_up", None)) is not None:
        told(message_ids)
