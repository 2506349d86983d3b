"""Who is there: looked up before every round, which goes on without those who are not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import WARNING

from flwr.common.logger import log
from flwr.serverapp import Grid

from strategies.roll_call import Latecomers, Population

_POLL_SECONDS = 1.0


class Attendance:
    """Which clients are connected, of those that answered the roll call or have joined since.

    Args:
        population: of the roll call; who joins later is added to it.
        fingerprint: hashes that every node must share with the server.
        least: so many clients are waited for, or all where there are fewer (min_replies).
        timeout_seconds: how long they are waited for.
    """

    def __init__(
        self,
        population: Population,
        fingerprint: Mapping[str, str],
        least: int,
        timeout_seconds: float,
    ) -> None:
        self.population = population
        self.absent: frozenset[int] = frozenset()
        self._latecomers = Latecomers(population, fingerprint)
        self._least = min(least, len(population))
        self._timeout_seconds = timeout_seconds

    @property
    def present(self) -> list[int]:
        """The clients that were connected at the last look, in order."""
        return sorted(self.population.nodes.keys() - self.absent)

    def look_around(self, grid: Grid) -> None:
        """Find out who is connected; wait while too few are.

        Raises:
            TimeoutError: if they are too few for longer than the timeout.
        """
        began = time.monotonic()
        while self._look(grid) < self._least:
            if time.monotonic() - began > self._timeout_seconds:
                present = len(self.population) - len(self.absent)
                raise TimeoutError(
                    f"min_replies={self._least}, but only {present} of {len(self.population)} "
                    f"clients are connected after {self._timeout_seconds:.0f} s "
                    "(runtime.connect_timeout_seconds)"
                )
            time.sleep(_POLL_SECONDS)

    def _look(self, grid: Grid) -> int:
        """Let in who is new, name who has gone or come back, return how many are there."""
        connected = set(grid.get_node_ids())
        self._latecomers.admit(grid, connected)
        nodes = self.population.nodes
        clients = range(len(self.population))
        absent = frozenset(client for client in clients if nodes.get(client) not in connected)
        if absent != self.absent:
            log(WARNING, "clients that are not connected: %s", sorted(absent) or "none")
        self.absent = absent
        return len(self.population) - len(absent)
