"""The options of strategy/differential_privacy: who clips, and who adds how much noise."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fedhet.common.configured import Option, Refers
from fedhet.common.kinds import Delta, NotNegative, Positive, Seed, Share, ShareAboveZero, Whole
from fedhet.strategies.components.samplers import BernoulliSampler
from fedhet.strategies.modes.private.clipping import AdaptiveNorm, ClippingNorm, FixedNorm
from fedhet.strategies.modes.private.differential_privacy import (
    CentralPrivacy,
    ClippingClient,
    LocalMechanism,
    LocalPrivacyClient,
    LocalPrivacyServer,
)
from fedhet.strategies.parts import Parts
from fedhet.strategies.slots import ClientSampler

Clipping = Literal["client", "server"]


class Privacy(Option):
    """Clips what clients send, and adds noise."""

    group = "strategy/differential_privacy"
    name: ClassVar[str] = "differential_privacy"  # of both halves

    delta: Delta = 1.0e-5
    """for which epsilon is reported"""
    reproducible_noise: bool = False
    """true: the noise follows from the seed, so that a run repeats itself to the bit; who knows the
    seed can take it off"""

    def halves(self, sampler: ClientSampler | None) -> Parts:
        """Return the two halves; ``sampler`` is the run's."""
        raise NotImplementedError


class Central(Privacy):
    """The clients, or the server, clip; the server adds noise to the sum."""

    clipping: Clipping = "client"
    """who clips: client | server (which then sees what clients send as it is)"""
    noise_multiplier: NotNegative = 1.0
    """z: the sum over m clients gets noise of z C, and is divided by m, the clients expected in a
    round; 0: none. Where C adapts, z is of the mean and the count of unclipped clients together"""
    seed: Annotated[Seed, Refers("${seed}")] = 0
    """of the noise, where it is reproducible"""
    clients: Annotated[Whole, Refers("${clients}")] = 0
    """N"""
    participation: Annotated[ShareAboveZero, Refers("${participation}")] = 1.0
    """|S| / N, the share of clients in a round"""

    def norm(self) -> ClippingNorm:
        """Return the clipping norm C."""
        raise NotImplementedError

    def halves(self, sampler: ClientSampler | None) -> Parts:
        """Clip at the clients, or at the server."""
        norm = self.norm()
        # Nobody can foresee who takes part.
        secret = isinstance(sampler, BernoulliSampler) and sampler.is_secret
        server = CentralPrivacy(self, norm, secret=secret)
        client = ClippingClient(self.clipping, adaptive=norm.adaptive)
        return Parts(client_sides={self.name: client}, server_sides={self.name: server})


class CentralFixed(Central):
    """Central differential privacy (McMahan et al. 2018): what a client sends is clipped, the
    server adds noise to the sum.
    """

    option = "central_fixed"

    clipping_norm: Positive = 1.0
    """C, the most that a client's update and payloads may measure together (L2)"""

    def norm(self) -> ClippingNorm:
        """Return a constant C."""
        return FixedNorm(self.clipping_norm)


class CentralAdaptive(Central):
    """Central differential privacy with a clipping norm that follows a quantile of the clients'
    norms (Andrew et al. 2021).
    """

    option = "central_adaptive"

    initial_clipping_norm: Positive = 0.1
    """C, at first"""
    target_quantile: Share = 0.5
    """gamma, the share of clients that shall not be clipped"""
    clip_norm_lr: Positive = 0.2
    """eta: C <- C exp(-eta (share - gamma)), a round"""
    count_stddev: Positive | None = None
    """noise on how many were not clipped, above noise_multiplier / 2; null: m / 20, m the clients
    expected in a round"""

    def norm(self) -> ClippingNorm:
        """Return a C that follows the quantile."""
        return AdaptiveNorm(
            self.initial_clipping_norm, self.target_quantile, self.clip_norm_lr, self.count_stddev
        )


class Local(Privacy):
    """Local differential privacy (Dwork and Roth 2014): a client clips what it sends and adds the
    noise itself.
    """

    option = "local"

    clipping_norm: Positive = 1.0
    """C, the most that a client's update and payloads may measure together (L2)"""
    epsilon: Positive = 1.0
    """of one upload; the noise is 2 C sqrt(2 ln(1.25 / delta)) / epsilon on every number, more
    where that is too little"""

    def halves(self, sampler: ClientSampler | None) -> Parts:
        """Clip and add noise at the clients."""
        mechanism = LocalMechanism(
            self.clipping_norm, self.epsilon, self.delta, self.reproducible_noise
        )
        return Parts(
            client_sides={self.name: LocalPrivacyClient(mechanism)},
            server_sides={self.name: LocalPrivacyServer(mechanism)},
        )
