"""The options of strategy/differential_privacy: who clips, who adds noise, and how much."""

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
    """delta of (epsilon, delta) privacy; the rows report epsilon"""
    reproducible_noise: bool = False
    """true: the noise follows from the seed, so a run can be repeated to the bit, and whoever knows
    the seed can remove the noise"""

    def halves(self, sampler: ClientSampler | None) -> Parts:
        """Return the two halves; ``sampler`` is the run's."""
        raise NotImplementedError


class Central(Privacy):
    """The clients, or the server, clip; the server adds noise to the sum."""

    clipping: Clipping = "client"
    """who clips: client | server (which then sees the unclipped replies)"""
    noise_multiplier: NotNegative = 1.0
    """z: the server adds noise z C to the sum and divides by m, the clients expected in a round; 0:
    no noise. With an adaptive C, z covers the mean and the count of unclipped clients together"""
    seed: Annotated[Seed, Refers("${seed}")] = 0
    """seed of reproducible noise"""
    clients: Annotated[Whole, Refers("${clients}")] = 0
    """N, the number of clients"""
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
    """Central differential privacy (McMahan et al. 2018): each client's reply is clipped, and the
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
    """C in round 1"""
    target_quantile: Share = 0.5
    """gamma, the share of clients that should not be clipped"""
    clip_norm_lr: Positive = 0.2
    """eta, how fast C follows: C <- C exp(-eta (share - gamma)) each round"""
    count_stddev: Positive | None = None
    """noise on the number of unclipped clients, above noise_multiplier / 2; null: m / 20, with m
    clients expected in a round"""

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
    """epsilon of one upload; every number gets noise of 2 C sqrt(2 ln(1.25 / delta)) / epsilon, or
    more if that is too little"""

    def halves(self, sampler: ClientSampler | None) -> Parts:
        """Clip and add noise at the clients."""
        mechanism = LocalMechanism(
            self.clipping_norm, self.epsilon, self.delta, self.reproducible_noise
        )
        return Parts(
            client_sides={self.name: LocalPrivacyClient(mechanism)},
            server_sides={self.name: LocalPrivacyServer(mechanism)},
        )
