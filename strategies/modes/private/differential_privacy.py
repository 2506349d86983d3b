"""Client-level differential privacy: uploads are clipped, and noise is added, centrally or locally.

Central     McMahan, Ramage, Talwar, Zhang. ICLR 2018. https://arxiv.org/abs/1710.06963
Local       a client adds the noise itself: Dwork and Roth 2014, Theorem A.1

v_i is the upload of client i, clipped to the norm C (strategies/modes/private/clipping.py):

    central     (sum_i v_i + N(0, (z C)^2)) / m          z the noise multiplier, at the server
    local       v_i + N(0, sigma^2),   sigma = 2 C sqrt(2 ln(1.25 / delta)) / epsilon, at the client

Where that formula is too small for epsilon (above 8 or so; it is proven for epsilon <= 1), sigma is
the exact one: Balle, Wang. ICML 2018, Theorem 8. https://arxiv.org/abs/1805.06530

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
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    STATE_LOST,
    ClientSide,
    Payloads,
    Reads,
    RefusedReplyError,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.modes.private.clipping import (
    KEY,
    NORM_BIT,
    ClippingNorm,
    arrays_of,
    clip,
    require_no_buffers,
    with_arrays,
)
from fedhet.strategies.modes.private.gaussian_mechanism import Uploads, epsilon_of
from fedhet.strategies.modes.private.seeded_rng import noise_from
from fedhet.strategies.round.exact_sum import norms_of

CLIPPING, NORM = "clipping", "norm"
UNCLIPPED = "unclipped"
_STREAM = 0xD9  # keeps noise independent of every other use of the run's seed
_ROUNDED = 1e-3  # by how much rounding may move the mean of the clients' bits
# The metrics that a client still sends under local privacy.
_NEEDED = ("partition-id", "num-examples", "num-steps", "lr-sum", STATE_LOST)


class ClippingClient(ClientSide):
    """Clips the client's upload to the norm that the server sends.

    Args:
        clipping: "client"; with "server" this side does nothing.
        adaptive: also send, as one more number to sum, whether the upload stayed unclipped.
    """

    clips = True

    def __init__(self, clipping: Literal["client", "server"], *, adaptive: bool) -> None:
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


class CentralSettings(Protocol):
    """The settings of central differential privacy (strategies/differential_privacy.py)."""

    clients: int
    participation: float
    noise_multiplier: float
    delta: float
    clipping: Literal["client", "server"]
    reproducible_noise: bool
    seed: int


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

    def __init__(self, privacy: CentralSettings, norm: ClippingNorm, *, secret: bool) -> None:
        clients, participation = privacy.clients, privacy.participation
        if clients < 1:
            raise ConfigError(
                f"clients={clients}: strategy/differential_privacy divides by the number of "
                "clients that it expects in a round, which must not depend on who connects: set "
                "clients to their number"
            )
        self.z, self.norm, self.delta = privacy.noise_multiplier, norm, privacy.delta
        self.at_client = privacy.clipping == "client"
        self.reads = Reads.SUM if self.at_client else Reads.REPLIES
        self.reproducible_noise, self.seed = privacy.reproducible_noise, privacy.seed
        self.clients, self.participation, self.secret = clients, participation, secret
        self.sends = frozenset({CLIPPING} if self.at_client else ())
        self.needs = frozenset({NORM_BIT} if self.at_client and self.norm.adaptive else ())
        self.adds = frozenset({NORM_BIT} if not self.at_client and self.norm.adaptive else ())
        self.size = FixedSizeSampler(participation=participation).size(clients)
        self.multiplier = self.norm.noise_multiplier(self.z, self.size)
        self.sensitivity: float | None = None
        self.uploads = Uploads()
        self.rounds = 0

    def init(self, params: Tensors) -> None:
        """Reset the counts; a missing accountant raises here, before round 1."""
        self.uploads, self.rounds = Uploads(), 0
        if self.z > 0:
            epsilon_of(self.z, 1, self.delta, KEY)

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
        seed = np.random.SeedSequence([self.seed, self.rounds, _STREAM])
        with noise_from(seed if self.reproducible_noise else None) as noise:
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
            found["dp-epsilon"] = epsilon_of(self.z, self.uploads.most, self.delta, KEY)
            if self._amplified():
                found["dp-epsilon-sampled"] = epsilon_of(
                    self.z, self.rounds, self.delta, KEY, self.participation
                )
        return found

    def _amplified(self) -> bool:
        """Return whether sampling amplifies privacy.

        Whoever knows the sampler's seed knows all cohorts. And if the sampler draws nobody, it
        takes one client; the probability of this must be negligible beside delta.
        """
        rate = self.participation
        nobody = self.rounds * (1 - rate) ** self.clients
        return self.secret and rate < 1.0 and nobody <= 1e-3 * self.delta

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
    bare = replace(reply, update={}, payloads={}, buffers={}, norms=norms_of(reply.update))
    payloads = {
        name: {tensor: size * value for tensor, value in tensors.items()}
        for name, tensors in reply.payloads.items()
    }
    return ReplySum([bare] * size, [1 / size] * size, reply.update, payloads, reply.buffers)


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


@dataclass(frozen=True)
class LocalMechanism:
    """Noise that a client adds to its own upload, so that it need not trust the server.

    Attributes:
        clipping_norm: C; two uploads differ by at most 2 C.
        epsilon: of one upload.
        delta: of one upload.
        reproducible_noise: draw the noise from the run's seed, so that the run can be repeated to
            the bit; it then hides nothing from those who know the seed, as the server does.
    """

    clipping_norm: float
    epsilon: float
    delta: float
    reproducible_noise: bool

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise over the sensitivity 2 C."""
        return _gaussian_multiplier(self.epsilon, self.delta)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise on every number."""
        return 2 * self.clipping_norm * self.noise_multiplier


class LocalPrivacyClient(ClientSide):
    """Clips the client's upload, adds noise, and keeps losses and accuracies to itself."""

    clips = True

    def __init__(self, mechanism: LocalMechanism) -> None:
        self.mechanism = mechanism

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with noise; raise ConfigError if buffers would leave without it."""
        require_no_buffers({"": self}, reply.buffers)
        mechanism = self.mechanism
        short, _ = clip(reply, mechanism.clipping_norm)
        with noise_from(seed if mechanism.reproducible_noise else None) as noise:
            noised = [a + noise(mechanism.noise, a.shape) for a in arrays_of(short)]
        metrics = {name: reply.metrics[name] for name in _NEEDED if name in reply.metrics}
        return replace(with_arrays(short, noised), metrics=metrics)


class LocalPrivacyServer(ServerSide):
    """Counts the uploads of each client and reports epsilon of the clients' mechanism."""

    def __init__(self, mechanism: LocalMechanism) -> None:
        self.mechanism = mechanism
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
        mechanism = self.mechanism
        return epsilon_of(mechanism.noise_multiplier, uploads, mechanism.delta, KEY)
