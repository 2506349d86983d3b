"""Central differential privacy of clients: uploads are clipped, and the server adds noise.

McMahan, Ramage, Talwar, Zhang. ICLR 2018. https://arxiv.org/abs/1710.06963

With v_i the upload of client i, clipped to the norm C (clipping.py), and z the noise multiplier:

    (sum_i v_i + N(0, (z C)^2)) / m

m is the number of clients expected in a round, participation * N: fixed before round 1, however
many replies arrive. So one client more or less moves the sum by C at most, which the accountant
assumes. (Divided by the number of replies |S|, the sum would also shift with |S|: by up to 2 C.)
Secure aggregation rounds the d numbers of the clipped v_i to multiples of a step h. Its norm is
then at most C + h sqrt(d), which takes the place of C in the noise.

Clipping is Flower's function (``flwr.supercore.differential_privacy``). Its strategy wrappers and
mods take each record of a reply for a whole model, while our replies hold an update and payloads,
and they divide by |S|.

Every client must weigh the same in the mean. epsilon comes from Opacus' accountant: one Gaussian
mechanism for every request to a client. ``dp_epsilon_sampled`` is lower, since it assumes that
nobody knows who took part; it is reported where a secret draws every client independently.
docs/privacy.md says which federations are neighbours, and what epsilon covers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from fedhet.common.configured import Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import NotNegative, Positive, Seed, Share, ShareAboveZero, Whole
from fedhet.strategies.base import (
    ClientSide,
    Norms,
    Payloads,
    Reads,
    RefusedReplyError,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from fedhet.strategies.modes.private.clipping import (
    KEY,
    NORM_BIT,
    AdaptiveNorm,
    ClippingNorm,
    FixedNorm,
    Privacy,
    arrays_of,
    clip,
    with_arrays,
)
from fedhet.strategies.modes.private.gaussian_mechanism import Uploads, epsilon_of, noise_from
from fedhet.strategies.round.exact_sum import norms_of
from fedhet.strategies.slots import ClientSampler

CLIPPING, NORM = "clipping", "norm"
UNCLIPPED = "unclipped"
_STREAM = 0xD9  # keeps noise independent of every other use of the run's seed
_ROUNDED = 1e-3  # by how much rounding may move the mean of the clients' bits
Clipping = Literal["client", "server"]


class ClippingClient(ClientSide):
    """Clips the client's upload to the norm that the server sends.

    Args:
        clipping: "client"; with "server" this side does nothing.
        adaptive: also send, as one more number to sum, whether the upload stayed unclipped.
    """

    clips = True

    def __init__(self, clipping: Clipping, *, adaptive: bool) -> None:
        at_client = clipping == "client"
        self.needs = frozenset({CLIPPING} if at_client else ())
        self.sends = frozenset({NORM_BIT} if at_client and adaptive else ())

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the clipped reply."""
        if not self.needs:
            return reply
        short, was_longer = clip(reply, float(received[CLIPPING][NORM]))
        return with_norm_bit(short, was_longer) if self.sends else short


def with_norm_bit(reply: Reply, was_longer: bool) -> Reply:
    """Return the reply with one more number to sum: whether it stayed unclipped."""
    bit = {UNCLIPPED: torch.tensor(0.0 if was_longer else 1.0)}
    return replace(reply, payloads={**reply.payloads, NORM_BIT: bit})


class CentralPrivacy(ServerSide):
    """Replaces the replies by m copies of their clipped sum plus noise, over m.

    Args:
        privacy: its settings.
        norm: the clipping norm C.
        secret: nobody can foresee who takes part in a round.

    Attributes:
        size: m, the expected number of clients in a round.
        sensitivity: by how much one client moved the last round's sum at most; None: before it.
    """

    leaves = Reads.SUM | Reads.STEPS

    def __init__(self, privacy: Central, norm: ClippingNorm, *, secret: bool) -> None:
        if privacy.clients < 1:
            raise ConfigError(
                f"clients={privacy.clients}: strategy/differential_privacy divides by the number "
                "of clients that it expects in a round, which must not depend on who connects: set "
                "clients to their number"
            )
        self.privacy, self.norm, self.secret = privacy, norm, secret
        self.z, self.at_client = privacy.noise_multiplier, privacy.clipping == "client"
        self.reads = Reads.SUM if self.at_client else Reads.REPLIES
        self.sends = frozenset({CLIPPING} if self.at_client else ())
        self.needs = frozenset({NORM_BIT} if self.at_client and self.norm.adaptive else ())
        self.adds = frozenset({NORM_BIT} if not self.at_client and self.norm.adaptive else ())
        self.size = FixedSizeSampler(participation=privacy.participation).size(privacy.clients)
        self.multiplier = self.norm.noise_multiplier(self.z, self.size)
        self.sensitivity: float | None = None
        self.uploads = Uploads()
        self.rounds = 0

    def init(self, params: Tensors) -> None:
        """Reset the counts; a missing accountant raises here, before round 1."""
        self.uploads, self.rounds = Uploads(), 0
        if self.z > 0:
            epsilon_of(self.z, 1, self.privacy.delta, KEY)

    def broadcast(self, client_id: int) -> Payloads:
        """Send C if clients clip."""
        return {CLIPPING: {NORM: torch.tensor(self.norm.value)}} if self.at_client else {}

    def asked(self, client_id: int) -> None:
        """Count the request."""
        self.uploads.add(client_id)

    def expected(self) -> Shapes:
        """Return the shape of the unclipped bit, if C adapts to it."""
        return {NORM_BIT: {UNCLIPPED: ()}} if self.needs else {}

    def check(self, reply: Reply) -> None:
        """Refuse an invalid bit; under secure aggregation it is the mean of all bits."""
        if self.needs:
            bit = float(reply.payloads[NORM_BIT][UNCLIPPED])
            if not -_ROUNDED <= bit <= 1.0 + _ROUNDED:
                raise RefusedReplyError(f"{NORM_BIT}={bit:.6g} is not between 0 and 1")

    def receive(self, params: Tensors, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Clip the uploads here, if the clients do not."""
        return replies if self.at_client else [self._clipped(reply) for reply in replies]

    def release(self, total: ReplySum) -> ReplySum:
        """Return the sum of m copies of the clipped uploads' sum plus noise, over m."""
        count = len(total.replies)
        mean = mean_reply(total, self.size)
        arrays = arrays_of(mean)
        longer = total.rounding * math.sqrt(sum(array.size for array in arrays))
        self.sensitivity = self.norm.value + longer
        seed = np.random.SeedSequence([self.privacy.seed, self.rounds, _STREAM])
        noise = noise_from(seed if self.privacy.reproducible_noise else None)
        for array in arrays:
            array += noise(self.multiplier * self.sensitivity / self.size, array.shape)
        if self.norm.adaptive:
            unclipped = float(total.payloads[NORM_BIT][UNCLIPPED])
            self.norm.move(unclipped, count, self.size, noise if self.z > 0 else None)
        self.rounds += 1
        return copies(with_arrays(mean, arrays), self.size)

    def _clipped(self, reply: Reply) -> Reply:
        short, was_longer = clip(reply, self.norm.value)
        return with_norm_bit(short, was_longer) if self.norm.adaptive else short

    def metrics(self) -> Mapping[str, float]:
        """Return C, by how much a client moves the sum, and epsilon if there is noise."""
        found = {"clipping-norm": self.norm.value}
        if self.sensitivity is not None:
            found["dp-sensitivity"] = self.sensitivity
        if self.z > 0:
            delta, rate = self.privacy.delta, self.privacy.participation
            found["dp-epsilon"] = epsilon_of(self.z, self.uploads.most, delta, KEY)
            if self._amplified():
                found["dp-epsilon-sampled"] = epsilon_of(self.z, self.rounds, delta, KEY, rate)
        return found

    def _amplified(self) -> bool:
        """Return whether sampling amplifies privacy.

        Whoever knows the sampler's seed knows all cohorts. And if the sampler draws nobody, it
        takes one client; the probability of this must be negligible beside delta.
        """
        rate = self.privacy.participation
        nobody = self.rounds * (1 - rate) ** self.privacy.clients
        return self.secret and rate < 1.0 and nobody <= 1e-3 * self.privacy.delta

    def state_dict(self) -> Payloads:
        """Return C, the number of rounds and the uploads by client."""
        norm = torch.tensor(self.norm.value, dtype=torch.float64)
        return {
            "released": {NORM: norm, "rounds": torch.tensor(self.rounds)},
            "uploads": self.uploads.tensors(),
        }

    def load_state_dict(self, state: Payloads) -> None:
        """Restore :meth:`state_dict`."""
        self.norm.value = float(state["released"][NORM])
        self.rounds = int(state["released"]["rounds"])
        self.uploads = Uploads.of(state["uploads"])


def mean_reply(total: ReplySum, size: int) -> Reply:
    """Return the sum of equally weighted replies over ``size``, with client id -1."""
    count = len(total.replies)

    def scaled(tensors: Tensors, factor: float) -> dict[str, Tensor]:
        return {name: factor * value for name, value in tensors.items()}

    return Reply(
        -1,
        max(1, round(sum(reply.num_examples for reply in total.replies) / count)),
        max(1, round(sum(reply.num_steps for reply in total.replies) / count)),
        math.fsum(reply.lr_sum for reply in total.replies) / count,
        scaled(total.update, count / size),
        {name: scaled(tensors, 1 / size) for name, tensors in total.payloads.items()},
        buffers=dict(total.buffers),
        per_example=total.replies[0].per_example,
    )


def copies(reply: Reply, size: int) -> ReplySum:
    """Return the sum of ``size`` copies of a reply."""
    bare = replace(reply, update={}, payloads={}, buffers={}, norms=Norms(norms_of(reply.update)))
    payloads = {
        name: {tensor: size * value for tensor, value in tensors.items()}
        for name, tensors in reply.payloads.items()
    }
    return ReplySum([bare] * size, [1 / size] * size, reply.update, payloads, reply.buffers)


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

    def halves(self, sampler: ClientSampler | None) -> tuple[ClientSide, ServerSide]:
        """Clip at the clients, or at the server."""
        norm = self.norm()
        # Nobody can foresee who takes part.
        secret = isinstance(sampler, BernoulliSampler) and sampler.is_secret
        client = ClippingClient(self.clipping, adaptive=norm.adaptive)
        return client, CentralPrivacy(self, norm, secret=secret)


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
