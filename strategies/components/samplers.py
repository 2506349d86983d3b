"""Client samplers: pure functions of (seed, round, N), so a resumed run needs no state."""

from __future__ import annotations

import hashlib
import os
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fedhet.common.configured import Option, Refers
from fedhet.common.kinds import Seed, ShareAboveZero

_STREAM = 0x5A  # keeps cohorts independent of every other use of the run's seed


class _Sampler(Option):
    group = "strategy/sampler"

    participation: Annotated[ShareAboveZero, Refers("${participation}")] = 1.0
    """|S| / N, the share of clients in a round"""


class FixedSizeSampler(_Sampler):
    """max(round(participation * N), 1) clients, uniformly without replacement."""

    option = "fixed_size"

    seed: Annotated[Seed, Refers("${seed}")] = 0
    """seed of the cohorts"""

    def size(self, num_clients: int) -> int:
        """Return |S|."""
        return max(1, int(self.participation * num_clients + 0.5))

    def sample(self, round: int, num_clients: int) -> list[int]:
        """Return the sorted client ids of a round's cohort."""
        generator, size = _generator(self.seed, round), self.size(num_clients)
        return sorted(generator.choice(num_clients, size=size, replace=False).tolist())


def most_clients(sampler: object, num_clients: int) -> int:
    """Return how many clients a round has at most."""
    return sampler.size(num_clients) if isinstance(sampler, FixedSizeSampler) else num_clients


class BernoulliSampler(_Sampler):
    """Each client independently with probability ``participation``; at least one.

    Every client knows the run's seed, and with it all cohorts. Without one they follow from a
    secret that this process draws.
    """

    option = "bernoulli"

    seed: Annotated[Seed | None, Refers("${seed}")] = 0
    """seed of the cohorts; null: a secret drawn at each start, so nobody can foresee who takes
    part, and no run can repeat the cohorts"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._secret = os.urandom(32) if self.seed is None else None

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
            return _generator(self.seed or 0, round).random(num_clients)
        # a keyed hash: from the rounds in which a client was asked, nobody finds the others
        stream = hashlib.shake_256(self._secret + round.to_bytes(8)).digest(8 * num_clients)
        words = np.frombuffer(stream, np.uint64) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53


def _generator(seed: int, round: int) -> np.random.Generator:
    return np.random.default_rng([_STREAM, seed, round])
