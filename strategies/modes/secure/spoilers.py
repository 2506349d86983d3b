"""Finds the clients that spoil secure sums, by bisecting over rounds.

A masked vector that is noise spoils its sum, and nobody can tell who sent it. So after such a round
its clients are suspects, and the next rounds leave half of the suspects out. A sum that is spoilt
again has a spoiler in it, so that the others are only doubtful. A good sum clears its clients, and
its round counts. The last suspect takes no further part.

If all clients take part in a round, nobody is left out who has not spoilt a sum, however many do in
every round; if few do, that holds for one spoiler. A client that spoils some of its sums alone can
lead the search to another one. So the log names whoever is left out.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from fedhet.strategies.modes.secure.aggregation import SecureReplies

_TRIES = 3  # spoilt sums, times N, after which a search is given up


@dataclass(frozen=True)
class SpoilerSearch:
    """The search so far.

    Attributes:
        suspects: clients of which at least one spoils sums.
        doubtful: others that were in a spoilt sum, and in no good one since.
        found: the spoilers.
        spoilt: how many sums were, since it began.
    """

    suspects: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    spoilt: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SpoilerSearch:
        """Return the search that a checkpoint has."""
        lists = {name: tuple(state.get(name, ())) for name in ("suspects", "doubtful", "found")}
        return cls(**lists, spoilt=int(state.get("spoilt", 0)))

    def after(self, summed: Collection[int], *, spoilt: bool) -> SpoilerSearch:
        """Return the search after the sum of these clients."""
        open_cases = sorted({*self.suspects, *self.doubtful})
        if spoilt:
            suspects = [client for client in open_cases if client in summed] or sorted(summed)
            doubtful = [client for client in open_cases if client not in suspects]
        else:
            suspects, doubtful = (
                [client for client in clients if client not in summed]
                for clients in (self.suspects, self.doubtful)
            )
        if not suspects:
            return SpoilerSearch(found=self.found)
        return SpoilerSearch(tuple(suspects), tuple(doubtful), self.found, self.spoilt + spoilt)

    def left_out(self, num_clients: int, least: int) -> frozenset[int]:
        """Return the clients that the next round does without; ``least`` of N must remain."""
        draw = random.Random(self.spoilt).sample  # where few are left, others are tried each time
        suspects = draw(self.suspects, len(self.suspects))
        doubtful = draw(self.doubtful, len(self.doubtful))
        others = num_clients - len(suspects) - len(doubtful) - len(self.found)
        tried = len(suspects) // 2
        missing = max(0, least - others - tried)
        tried += max(0, missing - len(doubtful))
        return frozenset((*self.found, *doubtful[missing:], *suspects[tried:]))

    def closed(self) -> SpoilerSearch:
        """Return the search with its last suspect found."""
        return SpoilerSearch(found=(*self.found, *self.suspects))


def searched(
    search: SpoilerSearch, replies: SecureReplies, num_clients: int, least: int
) -> SpoilerSearch:
    """Return the search after a round, and say where it is.

    Args:
        search: before the round.
        replies: of the round.
        num_clients: N.
        least: how many clients rounds need.
    """
    round, is_spoilt = replies.round, bool(replies.spoilt)
    new = search.after(replies.spoilt or round.report.clients, spoilt=is_spoilt)
    if new == search:  # nobody is suspected
        return search
    can = num_clients - len(new.found) > least and new.spoilt <= _TRIES * num_clients
    round.report.searching = is_spoilt and can
    if len(new.suspects) > 1:
        out = sorted(new.left_out(num_clients, least) - {*new.found}) or "none of them"
        text = "round %s: one of the clients %s spoils secure sums; the next round is without %s"
        log(WARNING, text, round.number, list(new.suspects), out)
    elif new.suspects and num_clients - len(new.found) - 1 < least:
        text = "round %s: client %s spoils the secure sums, and rounds need %s clients"
        log(WARNING, text, round.number, new.suspects[0], least)
    elif new.suspects:
        text = "round %s: client %s spoils the secure sums: the run goes on without it"
        log(WARNING, text, round.number, new.suspects[0])
        return new.closed()
    return new
