"""Local differential privacy: a client clips its upload to the norm C and adds the noise itself.

Dwork and Roth 2014, Theorem A.1

    v_i + N(0, sigma^2),   sigma = 2 C sqrt(2 ln(1.25 / delta)) / epsilon

Where that formula is too small for epsilon (above 8 or so; it is proven for epsilon <= 1), sigma is
the exact one: Balle, Wang. ICML 2018, Theorem 8. https://arxiv.org/abs/1805.06530
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from fedhet.common.kinds import Positive
from fedhet.strategies.base import STATE_LOST, ClientSide, Payloads, Reply, ServerSide, Tensors
from fedhet.strategies.modes.private.clipping import (
    KEY,
    Privacy,
    arrays_of,
    clip,
    require_no_buffers,
    with_arrays,
)
from fedhet.strategies.modes.private.gaussian_mechanism import Uploads, epsilon_of, noise_from
from fedhet.strategies.slots import ClientSampler

# The metrics that a client still sends.
_NEEDED = ("partition-id", "num-examples", "num-steps", "lr-sum", STATE_LOST)


@cache
def _gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Return sigma over the sensitivity: Dwork and Roth's, or the exact one where it is larger."""
    from scipy.optimize import brentq  # which takes half a second to import
    from scipy.special import log_ndtr, ndtr

    def excess(sigma: float) -> float:
        ahead, behind = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
        # the exponent is below 0, but for rounding where epsilon is large
        return float(ndtr(ahead) - math.exp(min(0.0, epsilon + log_ndtr(behind)))) - delta

    classical = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    if excess(classical) <= 0.0:
        return classical
    enough = classical
    while excess(enough) > 0.0:
        enough *= 2.0
    return float(brentq(excess, classical, enough, xtol=1e-12 * classical))


class Local(Privacy):
    """Local differential privacy (Dwork and Roth 2014): a client clips what it sends and adds the
    noise itself.
    """

    option = "local"

    clipping_norm: Positive = 1.0
    """C, the most that a client's update and payloads may measure together (L2)"""
    epsilon: Positive = 1.0
    """epsilon of one upload; every number gets noise of 2 C sqrt(2 ln(1.25 / delta)) / epsilon, or
    more if that is too little"""

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise over 2 C, by which two uploads differ at most."""
        return _gaussian_multiplier(self.epsilon, self.delta)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise on every number."""
        return 2 * self.clipping_norm * self.noise_multiplier

    def halves(self, sampler: ClientSampler | None) -> tuple[ClientSide, ServerSide]:
        """Clip and add noise at the clients."""
        return LocalPrivacyClient(self), LocalPrivacyServer(self)


class LocalPrivacyClient(ClientSide):
    """Clips the client's upload, adds noise, and keeps losses and accuracies to itself."""

    clips = True

    def __init__(self, privacy: Local) -> None:
        self.privacy = privacy

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with noise; raise ConfigError if buffers would leave without it."""
        require_no_buffers({"": self}, reply.buffers)
        short, _ = clip(reply, self.privacy.clipping_norm)
        noise = noise_from(seed if self.privacy.reproducible_noise else None)
        noised = [a + noise(self.privacy.noise, a.shape) for a in arrays_of(short)]
        metrics = {name: reply.metrics[name] for name in _NEEDED if name in reply.metrics}
        return replace(with_arrays(short, noised), metrics=metrics)


class LocalPrivacyServer(ServerSide):
    """Counts the uploads of each client and reports epsilon of the clients' mechanism."""

    def __init__(self, privacy: Local) -> None:
        self.privacy = privacy
        self.uploads = Uploads()

    def init(self, params: Tensors) -> None:
        """Reset the counts; a missing accountant raises here, before round 1."""
        self.uploads = Uploads()
        self._epsilon(1)

    def asked(self, client_id: int) -> None:
        """Count the request."""
        self.uploads.add(client_id)

    def metrics(self) -> Mapping[str, float]:
        """Return epsilon of the client that was asked most often."""
        return {"dp-epsilon": self._epsilon(self.uploads.most)}

    def state_dict(self) -> Payloads:
        """Return the uploads by client."""
        return {"uploads": self.uploads.tensors()}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore :meth:`state_dict`."""
        self.uploads = Uploads.of(state["uploads"])

    def _epsilon(self, uploads: int) -> float:
        return epsilon_of(self.privacy.noise_multiplier, uploads, self.privacy.delta, KEY)
