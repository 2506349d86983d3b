"""Client-level differential privacy: uploads are clipped, and noise is added, centrally or locally.

Central     McMahan, Ramage, Talwar, Zhang. ICLR 2018. https://arxiv.org/abs/1710.06963
Local       a client adds the noise itself: Dwork and Roth 2014, Theorem A.1

v_i is the upload of client i, clipped to the norm C (strategies/privacy/clipping.py):

    central     mean_i v_i + N(0, (z C / |S|)^2)         z the noise multiplier, at the server
    local       v_i + N(0, sigma^2),   sigma = 2 C sqrt(2 ln(1.25 / delta)) / epsilon, at the client

Clipping, noise and their sizes are Flower's functions (``flwr.supercore.differential_privacy``).
Its strategy wrappers and mods take each record of a reply for a whole model, while our replies hold
an update and payloads.

Every client must weigh the same in the mean. epsilon comes from Opacus' accountant: one Gaussian
mechanism for every request to a client. ``dp_epsilon_sampled`` is lower, since it assumes that
nobody knows who took part; it is reported for samplers that draw every client independently.
docs/privacy.md says what epsilon covers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.supercore.differential_privacy import (
    add_gaussian_noise_inplace,
    add_localdp_gaussian_noise_to_params,
    compute_stdv,
)
from torch import nn

from common.errors import ConfigError, require_choice, require_range
from strategies.base import (
    ClientSampler,
    ClientSide,
    LocalOptimizer,
    Payloads,
    Reply,
    ServerSide,
    Shapes,
    Tensors,
)
from strategies.components.samplers import BernoulliSampler
from strategies.privacy.clipping import (
    KEY,
    NORM_BIT,
    ClippingNorm,
    FixedNorm,
    arrays_of,
    clip,
    with_arrays,
)
from strategies.privacy.gaussian_mechanism import Uploads, epsilon_of
from strategies.privacy.reply_vector import mean_reply, stand_ins
from strategies.privacy.seeded_rng import seeded_numpy

CLIPPING, NORM = "clipping", "norm"
UNCLIPPED = "unclipped"
_STREAM = 0xD9  # keeps noise independent of every other use of the run's seed
# The metrics that a client still sends under local privacy.
_NEEDED = ("partition-id", "num-examples", "num-steps", "lr-sum")


class _ClippingSide(ClientSide):
    """Rejects models that send buffers: a noisy variance is no variance."""

    clips = True

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Reject BatchNorm's running statistics."""
        for name, value in model.named_buffers():
            if value.is_floating_point():
                raise ConfigError(
                    f"{KEY} covers trained tensors only, and the model also sends {name}: choose a "
                    "task.model without running statistics (resnet18_gn), or set "
                    "strategy/differential_privacy=none"
                )


class ClippingClient(_ClippingSide):
    """Clips the client's upload to the norm that the server sends.

    Args:
        clipping: "client"; with "server" this side does nothing.
        adaptive: also send, as one more number to sum, whether the upload stayed unclipped.
    """

    def __init__(
        self, clipping: Literal["client", "server"] = "client", adaptive: bool = False
    ) -> None:
        at_client = clipping == "client"
        self.needs = frozenset({CLIPPING} if at_client else ())
        self.sends = frozenset({NORM_BIT} if at_client and adaptive else ())

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the clipped reply."""
        if not self.needs:
            return reply
        short, was_longer = clip(reply, float(received[CLIPPING][NORM]))
        if not self.sends:
            return short
        bit = {UNCLIPPED: torch.tensor(0.0 if was_longer else 1.0)}
        return replace(short, payloads={**short.payloads, NORM_BIT: bit})


class CentralPrivacy(ServerSide):
    """Replaces every reply by the mean of the clipped uploads plus noise.

    Args:
        noise_multiplier: z; 0: clipping without noise.
        norm: the clipping norm C.
        clipping: who clips: "client", or "server", which then sees the unclipped uploads.
        delta: epsilon is reported for it.
        secret: draw the noise from the operating system instead of the run's seed.
        seed: of the run.
        sampler: class of the run's sampler.
        clients: N, 0 if unknown.
        participation: |S| / N.
    """

    averages = True
    individual = (
        "it clips single replies: set strategy.differential_privacy.clipping=client, so that the "
        "clients do"
    )

    def __init__(
        self,
        noise_multiplier: float = 1.0,
        norm: ClippingNorm | None = None,
        clipping: Literal["client", "server"] = "client",
        delta: float = 1e-5,
        secret: bool = False,
        seed: int = 0,
        sampler: type[ClientSampler] | None = None,
        clients: int = 0,
        participation: float = 1.0,
    ) -> None:
        self.z = require_range(f"{KEY}.noise_multiplier", noise_multiplier)
        self.norm = norm or FixedNorm()
        require_choice(f"{KEY}.clipping", clipping, ("client", "server"))
        self.at_client = clipping == "client"
        self.delta = require_range(f"{KEY}.delta", delta, low=1e-10, high=0.1)
        self.secret, self.seed = secret, seed
        self.sampler, self.clients, self.participation = sampler, clients, participation
        self.sends = frozenset({CLIPPING} if self.at_client else ())
        self.needs = frozenset({NORM_BIT} if self.at_client and self.norm.adaptive else ())
        self.additive_payloads = self.needs if self.at_client else None
        if clients:
            planned = max(1, int(participation * clients + 0.5))
            self.norm.plan(planned)
            self.norm.noise_multiplier(self.z, planned)
        self.uploads = Uploads()
        self.rounds = 0

    def init(self, params: Tensors) -> None:
        """Reset the counts; a missing accountant raises here, before round 1."""
        self.uploads, self.rounds = Uploads(), 0
        if self.z > 0:
            epsilon_of(self.z, 1, self.delta, KEY)

    def broadcast(self, client_id: int) -> Payloads:
        """Send C if clients clip, and count the request."""
        self.uploads.add(client_id)
        return {CLIPPING: {NORM: torch.tensor(self.norm.value)}} if self.at_client else {}

    def expected(self) -> Shapes:
        """Return the shape of the unclipped bit, if C adapts to it."""
        return {NORM_BIT: {UNCLIPPED: ()}} if self.needs else {}

    def receive(self, params: Tensors, replies: Sequence[Reply]) -> list[Reply]:
        """Return the mean of the clipped uploads plus noise in place of each reply."""
        size = len(replies)
        if self.at_client:
            unclipped, mean = 0.0, mean_reply(replies)
            if self.needs:
                unclipped = size * float(mean.payloads[NORM_BIT][UNCLIPPED])
        else:
            found = [clip(reply, self.norm.value) for reply in replies]
            unclipped = float(sum(not was_longer for _, was_longer in found))
            mean = mean_reply([reply for reply, _ in found])
        seed = np.random.SeedSequence([self.seed, self.rounds, _STREAM])
        with seeded_numpy(None if self.secret else seed):
            arrays = arrays_of(mean)
            multiplier = self.norm.noise_multiplier(self.z, size)
            add_gaussian_noise_inplace(
                list(arrays), compute_stdv(multiplier, self.norm.value, size)
            )
            self.norm.move(unclipped, size, noise=self.z > 0)
        self.rounds += 1
        return stand_ins(with_arrays(mean, arrays), replies)

    def metrics(self) -> Mapping[str, float]:
        """Return C, and epsilon if there is noise."""
        found = {"clipping-norm": self.norm.value}
        if self.z > 0:
            found["dp-epsilon"] = epsilon_of(self.z, self.uploads.most, self.delta, KEY)
            if self._poisson_sampled():
                found["dp-epsilon-sampled"] = epsilon_of(
                    self.z, self.rounds, self.delta, KEY, self.participation
                )
        return found

    def _poisson_sampled(self) -> bool:
        """Return whether sampling amplifies privacy.

        The sampler takes one client even if it has drawn none; that must be negligible beside
        delta.
        """
        rate = self.participation
        nobody = self.rounds * (1 - rate) ** self.clients
        return self.sampler is BernoulliSampler and rate < 1.0 and nobody <= 1e-3 * self.delta

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


@dataclass(frozen=True)
class LocalMechanism:
    """Noise that a client adds to its own upload, so that it need not trust the server.

    Attributes:
        clipping_norm: C; two uploads differ by at most 2 C.
        epsilon: of one upload, by the formula above, which holds for epsilon <= 1.
        delta: of one upload.
        secret: draw the noise from the operating system instead of the run's seed.
    """

    clipping_norm: float = 1.0
    epsilon: float = 1.0
    delta: float = 1e-5
    secret: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range(f"{KEY}.clipping_norm", self.clipping_norm, open_low=True)
        require_range(f"{KEY}.epsilon", self.epsilon, open_low=True)
        require_range(f"{KEY}.delta", self.delta, low=1e-10, high=0.1)

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise over the sensitivity 2 C."""
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon


class LocalPrivacyClient(_ClippingSide):
    """Clips the client's upload, adds noise, and keeps losses and accuracies to itself."""

    def __init__(self, mechanism: LocalMechanism | None = None) -> None:
        self.mechanism = mechanism or LocalMechanism()

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with noise."""
        mechanism = self.mechanism
        short, _ = clip(reply, mechanism.clipping_norm)
        with seeded_numpy(None if mechanism.secret else seed):
            noised = add_localdp_gaussian_noise_to_params(
                ndarrays_to_parameters(list(arrays_of(short))),
                2 * mechanism.clipping_norm,
                mechanism.epsilon,
                mechanism.delta,
            )
        metrics = {name: reply.metrics[name] for name in _NEEDED if name in reply.metrics}
        return replace(with_arrays(short, parameters_to_ndarrays(noised)), metrics=metrics)


class LocalPrivacyServer(ServerSide):
    """Counts the uploads of each client and reports epsilon of the clients' mechanism."""

    def __init__(self, mechanism: LocalMechanism | None = None) -> None:
        self.mechanism = mechanism or LocalMechanism()
        self.uploads = Uploads()

    def init(self, params: Tensors) -> None:
        """Reset the counts; a missing accountant raises here, before round 1."""
        self.uploads = Uploads()
        self._epsilon(1)

    def broadcast(self, client_id: int) -> Payloads:
        """Send nothing, and count the request."""
        self.uploads.add(client_id)
        return {}

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
