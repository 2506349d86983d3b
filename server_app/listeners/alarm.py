"""Warns of clients whose update, or a payload of theirs, is unusually large."""

from __future__ import annotations

from logging import WARNING

from flwr.common.logger import log

from fedhet.server_app.listeners import Finished, Listener
from fedhet.strategies.round.alarm import LIMIT


class Alarm(Listener):
    """Logs each round's alarms, for a run in which a client may be hostile.

    On non-IID data an honest client's update is sometimes large, too. So a simulation of honest
    clients does not have this listener; the figures are in its rows all the same.
    """

    def __init__(self) -> None:
        self._named: set[int] = set()

    def on_round(self, finished: Finished) -> None:
        """Name the clients; what an alarm means is said with a client's first one."""
        for client, scores in finished.report.alarms.items():
            what = ", ".join(f"{name} (z = {z:.1f})" for name, z in scores.items())
            text = "round %s: client %s sent an unusually large %s"
            if client not in self._named:
                text += (
                    f"; z is the distance from the other clients' median length, and {LIMIT:g} the "
                    "limit. Unusual data, an error or an attack can be the reason: look at this "
                    "client, and see docs/robust.md for aggregators that limit what one can do"
                )
            self._named.add(client)
            log(WARNING, text, finished.report.round, client, what)
