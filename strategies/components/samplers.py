"""Client samplers: pure functions of (seed, round, N), so a resumed run needs no state."""

from __future__ import annotations

import numpy as np

from fedhet.common.errors import require_range

_STREAM = 0x5A  # keeps cohorts independent of every other use of the run's seed


class _Sampler:
    def __init__(self, participation: float = 1.0, seed: int = 0) -> None:
        self.participation = require_range("participation", participation, high=1.0, open_low=True)
        self.seed = seed

    def _generator(self, round: int) -> np.random.Generator:
        return np.random.default_rng([_STREAM, self.seed, round])


class FixedSizeSampler(_Sampler):
    """max(round(participation * N), 1) clients, uniformly without replacement."""

    def size(self, num_clients: int) -> int:
        """Return |S|."""
        return max(1, int(self.participation * num_clients + 0.5))

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""
        generator, size = self._generator(round), self.size(num_clients)
        return sorted(generator.choice(num_clients, size=size, replace=False).tolist())


def most_clients(sampler: object, num_clients: int) -> int:
    """Return how many clients a round has at most."""
    return sampler.size(num_clients) if isinstance(sampler, FixedSizeSampler) else num_clients


class BernoulliSampler(_Sampler):
    """Each client independently with probability ``participation``; at least one."""

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""
        draws = self._generator(round).random(num_clients)
        chosen = np.flatnonzero(draws < self.participation)
        if chosen.size == 0:
            chosen = np.array([draws.argmin()])
        return [int(client) for client in chosen]
