"""The Gaussian mechanism for sums and counts by class, privacy's accountant, and its noise.

Dwork and Roth 2014; clipping: Abadi et al., Deep Learning with Differential Privacy, CCS 2016,
https://arxiv.org/abs/1607.00133. An example adds a vector v, clipped to ||v|| <= S, to the sums of
its class and 1 to the count. Adding or removing one example of a client, with the same model, moves
the upload (sums, counts) by at most

    Delta = sqrt(S^2 + 1),  so N(0, (z Delta)^2) is added to every number, z the noise multiplier

T uploads of a client compose; Opacus' PRV accountant gives epsilon for delta. Every upload counts
as if the same example were in each: the server knows who took part, so sampling amplifies nothing.

The mechanism covers what the sums and counts reveal beyond the model they were computed with. It
does not cover the model update beside them: that takes DP-SGD. The noise comes from the operating
system. With ``reproducible_noise`` it follows from the run's seed, and whoever knows that, as the
server does, can draw it again and subtract it.
"""

from __future__ import annotations

import logging
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.common.configured import Configured
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Delta, NotNegative, Positive
from fedhet.strategies.base import Tensors

if TYPE_CHECKING:
    from opacus.accountants import IAccountant

_HOPELESS = 60.0  # above this epsilon the tight accountant takes gigabytes for nothing


class GaussianMechanism(Configured):
    """Clips what an example adds, and adds noise to the sums and counts; at z = 0 neither."""

    section = "strategy.soft_labels"

    noise_multiplier: NotNegative = 0.0
    """z, privacy of the uploads: noise of z sqrt(clip^2 + 1) on every number; 0: none"""
    clip: Positive = 1.0
    """maximum L2 norm of an example's soft label, with noise"""
    delta: Delta = 1.0e-5
    """delta of (epsilon, delta) privacy; the rows report epsilon"""
    reproducible_noise: bool = False
    """true: the noise follows from the seed, so that a run repeats itself to the bit; who knows the
    seed can take it off"""

    @property
    def active(self) -> bool:
        """Whether the mechanism adds noise."""
        return self.noise_multiplier > 0

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on every number that one client sends."""
        return self.noise_multiplier * math.hypot(self.clip, 1.0)

    def clipped(self, vectors: Tensor) -> Tensor:
        """Return the rows (B, d), shortened to at most ``clip``."""
        return vectors.renorm(2, 0, self.clip) if self.active else vectors

    def noised(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Return the values plus noise drawn on the CPU."""
        if not self.active:
            return values
        if self.reproducible_noise:
            drawn = torch.randn(values.shape, generator=generator, dtype=values.dtype)
        else:
            drawn = torch.from_numpy(hidden_noise(1.0, tuple(values.shape))).to(values.dtype)
        return values + self.noise * drawn.to(values.device)

    def epsilon(self, uploads: int) -> float:
        """Return epsilon for ``delta`` after this many uploads of one client."""
        return epsilon_of(self.noise_multiplier, uploads, self.delta, self.section)


class Uploads(dict[int, int]):
    """How often each client was asked to upload; requests without a reply count, too."""

    def add(self, client_id: int) -> None:
        """Count one more request."""
        self[client_id] = self.get(client_id, 0) + 1

    @property
    def most(self) -> int:
        """The largest count of any client."""
        return max(self.values(), default=0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the counts as tensors, for a checkpoint."""
        clients = sorted(self)
        return {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "uploads": torch.tensor([self[client] for client in clients], dtype=torch.int64),
        }

    @classmethod
    def of(cls, tensors: Tensors) -> Uploads:
        """Return the counts that :meth:`tensors` wrote."""
        return cls(zip(tensors["clients"].tolist(), tensors["uploads"].tolist(), strict=True))


@lru_cache
def epsilon_of(
    noise_multiplier: float, uploads: int, delta: float, key: str, rate: float = 1.0
) -> float:
    """Return epsilon for ``delta`` after composed Gaussian mechanisms.

    Args:
        noise_multiplier: z, the standard deviation of the noise over the sensitivity.
        uploads: T, the number of mechanisms.
        delta: of (epsilon, delta).
        key: of the recipe, for the error if Opacus is not installed.
        rate: at which what is protected is drawn anew each time (Poisson sampling).
    """
    if uploads == 0:
        return 0.0
    if noise_multiplier**2 == 0.0:  # the accountants divide by it
        return math.inf
    loose, tight = _accountants(key)
    loose.history = tight.history = [(noise_multiplier, rate, uploads)]
    # a sampling rate of 1 makes it take log 0, which it handles
    with warnings.catch_warnings(action="ignore"), np.errstate(divide="ignore"):
        bound = float(loose.get_epsilon(delta=delta))
        if bound > _HOPELESS:
            return bound
        return max(0.0, float(tight.get_epsilon(delta=delta)))


def _accountants(key: str) -> tuple[IAccountant, IAccountant]:
    """Return a loose accountant (Renyi divergence) and a tight one (privacy loss distribution)."""
    handlers = list(logging.root.handlers)
    try:
        from opacus.accountants import PRVAccountant, RDPAccountant
    except ImportError as error:
        raise ConfigError(
            "noise needs an accountant: pip install -e '.[privacy]', or set "
            f"{key}.noise_multiplier=0"
        ) from error
    logging.root.handlers = handlers  # Opacus adds one, which would print every line twice
    return RDPAccountant(), PRVAccountant()


# (standard deviation, shape) -> Gaussian noise
Noise = Callable[[float, tuple[int, ...]], NDArray[np.float64]]


@contextmanager
def seeded_numpy(seed: np.random.SeedSequence | None) -> Iterator[None]:
    """Seed numpy's global generator inside the block; restore it and Python's afterwards.

    None leaves numpy's generator as it is.
    """
    python, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    if seed is not None:
        np.random.seed(seed.generate_state(4).tolist())  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(state)  # noqa: NPY002


def noise_from(seed: np.random.SeedSequence | None) -> Noise:
    """Return a source of Gaussian noise: hidden for None, else repeatable from the seed."""
    if seed is None:
        return hidden_noise
    drawn = np.random.RandomState(seed.generate_state(4))
    return lambda stddev, shape: np.asarray(drawn.normal(0, stddev, shape))


def hidden_noise(stddev: float, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return noise from the operating system's cryptographic generator (Box and Muller 1958).

    Numpy's generators hide nothing, whatever their seed: from enough bare noise, as in tensors that
    did not move, one can compute their state and all other noise.
    """
    count = math.prod(shape)
    words = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count)
    first, second = (words >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return np.asarray(stddev * normal.reshape(shape))
