"""Client samplers: pure functions of (seed, round, N), so a resumed run needs no state."""

from __future__ import annotations

import hashlib
import os

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import require_range, require_whole

_STREAM = 0x5A  # keeps cohorts independent of every other use of the run's seed


class _Sampler:
    def __init__(self, participation: float = 1.0, seed: int = 0) -> None:
        self.participation = require_range("participation", participation, high=1.0, open_low=True)
        self.seed = require_whole("strategy.sampler.seed", seed)

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
    """Each client independently with probability ``participation``; at least one.

    Args:
        participation: the probability.
        seed: of the run, which every client knows, and with it all cohorts. None: they follow from
            a secret that this process draws, and no run has them again.
    """

    def __init__(self, participation: float = 1.0, seed: int | None = 0) -> None:
        super().__init__(participation, 0 if seed is None else seed)
        self._secret = os.urandom(32) if seed is None else None

    @property
    def is_secret(self) -> bool:
        """Whether nobody can foresee who takes part."""
        return self._secret is not None

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""
        draws = self._draws(round, num_clients)
        chosen = np.flatnonzero(draws < self.participation)
        if chosen.size == 0:
            chosen = np.array([draws.argmin()])
        return [int(client) for client in chosen]

    def _draws(self, round: int, num_clients: int) -> NDArray[np.float64]:
        """Return a number in [0, 1) for each client."""
        if self._secret is None:
            return self._generator(round).random(num_clients)
        # a keyed hash: from the rounds in which a client was asked, nobody finds the others
        stream = hashlib.shake_256(self._secret + round.to_bytes(8)).digest(8 * num_clients)
        words = np.frombuffer(stream, np.uint64) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53
