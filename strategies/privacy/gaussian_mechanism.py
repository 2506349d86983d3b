"""The Gaussian mechanism on sums and counts by class, and the (epsilon, delta) it buys.

Dwork and Roth 2014; Abadi et al., Deep Learning with Differential Privacy, CCS 2016,
https://arxiv.org/abs/1607.00133 (clipping). An example adds a vector v, clipped to ||v|| <= S, to
the sums of its class and 1 to the count. With one example more or less at a client, and the same
model, the upload (sums, counts) moves by at most

    Delta = sqrt(S^2 + 1),  so N(0, (z Delta)^2) is added to every number, z the noise multiplier

One upload is a Gaussian mechanism of multiplier z; T uploads of a client compose. Opacus' PRV
accountant gives epsilon for delta (for T Gaussian mechanisms it must be within its error of the
closed form of Balle and Wang 2018, which a test compares). Every upload counts, as though the same
example were in each: no amplification by sampling is claimed, since who took part is known.

What it covers: what the uploaded sums and counts say beyond the model they were computed with. The
model update that travels beside them is not covered: that takes DP-SGD. And whoever knows the run's
seed, as the server does, can draw the same noise and take it off again: that is right for an
experiment, which must repeat itself; ``secret`` draws from the operating system instead.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, require_range
from strategies.base import Tensors

if TYPE_CHECKING:
    from opacus.accountants import IAccountant

_HOPELESS = 60.0  # an epsilon from which on the tight accountant takes gigabytes for nothing


@dataclass(frozen=True)
class GaussianMechanism:
    """Clips what an example adds, and adds noise to the sums and counts.

    Attributes:
        noise_multiplier: z; 0: neither clipping nor noise.
        clip: S, the greatest L2 norm of an example's vector. (A soft label's is at most 1.)
        delta: for which epsilon is reported.
        secret: draw the noise from the operating system and not from the run's seed. Such a run
            cannot be repeated to the bit.
    """

    noise_multiplier: float = 0.0
    clip: float = 1.0
    delta: float = 1e-5
    secret: bool = False

    def __post_init__(self) -> None:
        """Check the ranges; below the least delta the accountant's arithmetic gives out."""
        require_range("strategy.soft_labels.noise_multiplier", self.noise_multiplier)
        require_range("strategy.soft_labels.clip", self.clip, open_low=True)
        require_range("strategy.soft_labels.delta", self.delta, low=1e-10, high=0.1)

    @property
    def active(self) -> bool:
        """Whether there is noise."""
        return self.noise_multiplier > 0

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on every number that one client sends."""
        return self.noise_multiplier * math.hypot(self.clip, 1.0)

    def clipped(self, vectors: Tensor) -> Tensor:
        """Return the rows (B, d), shortened to at most ``clip``."""
        return vectors.renorm(2, 0, self.clip) if self.active else vectors

    def noised(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Return the values with noise, drawn on the CPU."""
        if not self.active:
            return values
        if self.secret:  # torch's generators start from 32 bits, which can be tried one by one
            system = random.SystemRandom()
            drawn = torch.tensor([system.gauss() for _ in range(values.numel())])
            drawn = drawn.view(values.shape).to(values.dtype)
        else:
            drawn = torch.randn(values.shape, generator=generator, dtype=values.dtype)
        return values + self.noise * drawn.to(values.device)

    def epsilon(self, uploads: int) -> float:
        """Return epsilon for ``delta`` after so many uploads of one client.

        Raises:
            ConfigError: where Opacus is not installed.
        """
        return epsilon_of(self.noise_multiplier, uploads, self.delta, "strategy.soft_labels")


class Uploads(dict[int, int]):
    """By client id, how often it was asked: each time counts, whatever came of it."""

    def add(self, client_id: int) -> None:
        """Count one more."""
        self[client_id] = self.get(client_id, 0) + 1

    @property
    def most(self) -> int:
        """The count of the client that was asked most often."""
        return max(self.values(), default=0)

    def tensors(self) -> dict[str, Tensor]:
        """Return them as tensors, for a checkpoint."""
        clients = sorted(self)
        return {
            "clients": torch.tensor(clients, dtype=torch.int64),
            "uploads": torch.tensor([self[client] for client in clients], dtype=torch.int64),
        }

    @classmethod
    def of(cls, tensors: Tensors) -> Uploads:
        """Return what :meth:`tensors` gave."""
        pairs = zip(tensors["clients"].tolist(), tensors["uploads"].tolist(), strict=True)
        return cls(pairs)


def epsilon_of(
    noise_multiplier: float, uploads: int, delta: float, key: str, rate: float = 1.0
) -> float:
    """Return epsilon for ``delta`` after so many Gaussian mechanisms.

    Args:
        noise_multiplier: z, the noise' standard deviation over the sensitivity.
        uploads: how many.
        delta: of (epsilon, delta).
        key: whose ``noise_multiplier`` it is, for the error.
        rate: with which probability, each time anew, what is to be protected is in it at all.

    Raises:
        ConfigError: where Opacus is not installed.
    """
    if uploads == 0:
        return 0.0
    loose, tight = _accountants(key)
    loose.history = tight.history = [(noise_multiplier, rate, uploads)]
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.simplefilter("ignore")  # at a sampling rate of 1 it takes log 0, and copes
        bound = float(loose.get_epsilon(delta=delta))
        if bound > _HOPELESS:
            return bound
        return max(0.0, float(tight.get_epsilon(delta=delta)))


def _accountants(key: str) -> tuple[IAccountant, IAccountant]:
    """Return a loose one (Renyi divergence) and a tight one (distribution of the privacy loss)."""
    handlers = list(logging.root.handlers)
    try:
        from opacus.accountants import PRVAccountant, RDPAccountant
    except ImportError as error:
        raise ConfigError(
            "noise needs an accountant: pip install -e '.[privacy]', or set "
            f"{key}.noise_multiplier=0"
        ) from error
    logging.root.handlers = handlers  # its import adds one, and every line would come twice
    return RDPAccountant(), PRVAccountant()
