"""SCAFFOLD as NIID-Bench's code had it until 2022-08-17 (commit 66095cc, its issue 12).

Its README's rows are of January 2021. The server divided the sum of the changes by |S|, the clients
of the round, in place of all N:

    c <- c + (1 / |S|) sum_{i in S} (c_i+ - c_i)

If all of them start from c_0, c is then N / |S| times the mean of all c_i, less (N / |S| - 1) c_0.
Here c_0 is zero; there it was a random network, which with ten of 100 clients comes back nine times
as long.
"""

from __future__ import annotations

from dataclasses import replace

from fedhet.strategies.base import Cohort, ReplySum, Tensors
from fedhet.strategies.parts import Parts
from fedhet.strategies.scaffold import SCAFFOLD, ControlVariateServer


class ControlVariateOfSelected(ControlVariateServer):
    """The server half that divides by |S|."""

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """c <- c + (1 / |S|) sum_i (c_i+ - c_i)."""
        super().reduce(total, update, replace(cohort, num_clients=cohort.size))


class SCAFFOLDOfSelected(SCAFFOLD):
    """SCAFFOLD of NIID-Bench before August 2022: c becomes N / |S| times too long. Not for use."""

    def parts(self) -> Parts:
        """Divide by |S| in place of N."""
        parts = super().parts()
        sides = {self.name: ControlVariateOfSelected("all", self.name)}
        return replace(parts, server_sides=sides)
