"""Differential privacy of whole clients: a client's part in a round is clipped, noise is added.

Central     McMahan, Ramage, Talwar, Zhang. ICLR 2018. https://arxiv.org/abs/1710.06963
Adaptive    Andrew, Thakkar, McMahan, Ramaswamy. NeurIPS 2021. https://arxiv.org/abs/1905.03871
Local       a client adds the noise itself: Dwork and Roth 2014, Theorem A.1

The part v_i of client i in round t is all that it sends of tensors: its update y_i - x together
with its payloads, as one vector. Payloads that are sums over examples are not in it: these must
have a mechanism of their own (strategies/privacy/gaussian_mechanism.py). With the clipping norm C:

    v_i <- v_i min(1, C / ||v_i||)
    central    mean_i v_i + N(0, (z C / |S|)^2)          z the noise multiplier, at the server
    adaptive   C <- C exp(-eta (b - gamma)),   b = (sum_i [||v_i|| <= C] + N(0, s^2)) / |S|,
               and z_v = (z^-2 - (2 s)^-2)^(-1/2) in place of z: both together are worth z
    local      v_i + N(0, sigma^2),   sigma = 2 C sqrt(2 ln(1.25 / delta)) / epsilon, at the client

Clipping, noise and their sizes are Flower's functions (``flwr.supercore.differential_privacy``).
Its strategy wrappers and mods are not used: they take each record of a reply for a whole model, and
ours are an update and payloads. And where b is the share of the updates that are *not* clipped, in
the paper and here, Flower's wrappers take the share of those that are: C then runs away from its
quantile.

Every client must weigh the same in the mean. epsilon is that of Opacus' accountant, one Gaussian
mechanism for every time that the client was asked. ``dp_epsilon_sampled`` is lower: it counts on
nobody knowing who took part, and is reported for samplers that draw every client by itself. What
epsilon covers, and what not, is in docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.supercore.differential_privacy import (
    adaptive_clip_inputs_inplace,
    add_gaussian_noise_inplace,
    add_localdp_gaussian_noise_to_params,
    compute_adaptive_noise_params,
    compute_stdv,
    get_norm,
)
from numpy.typing import NDArray
from torch import Tensor, nn

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
from strategies.privacy.gaussian_mechanism import Uploads, epsilon_of
from strategies.privacy.reply_vector import mean_reply, stand_ins
from strategies.privacy.seeded_rng import flower_draws_from

KEY = "strategy.differential_privacy"
CLIPPING, NORM = "clipping", "norm"
NORM_BIT, UNCLIPPED = "norm_bit", "unclipped"
_STREAM = 0xD9  # keeps noise independent of every other use of the run's seed
# What of a client's metrics still travels where the server is not to be trusted with more.
_NEEDED = ("partition-id", "num-examples", "num-steps", "lr-sum")

Arrays = list[NDArray[np.float64]]


# ---- a client's part -----------------------------------------------------------------------------


def part_of(reply: Reply) -> Arrays:
    """Return copies of what is clipped together."""
    return [
        tensors[name].detach().double().cpu().numpy().copy()
        for tensors in _covered(reply).values()
        for name in sorted(tensors)  # noise must not depend on the order that they came in
    ]


def with_part(reply: Reply, arrays: Arrays) -> Reply:
    """Return the reply with these arrays for those of :func:`part_of`."""
    values = iter(arrays)
    changed = {
        group: {name: _like(tensors[name], next(values)) for name in sorted(tensors)}
        for group, tensors in _covered(reply).items()
    }
    new = changed.pop("")
    update = {name: new[name] for name in reply.update}
    return replace(reply, update=update, payloads={**reply.payloads, **changed})


def clipped(reply: Reply, norm: float) -> tuple[Reply, bool]:
    """Return the reply with its part shortened to ``norm``, and whether it had to be."""
    arrays = part_of(reply)
    if get_norm(arrays) == 0.0:  # Flower divides by it
        return reply, False
    was_longer = adaptive_clip_inputs_inplace(arrays, norm)
    return (with_part(reply, arrays), True) if was_longer else (reply, False)


def _covered(reply: Reply) -> dict[str, Tensors]:
    """Return the update as "", and the payloads."""
    left_out = reply.per_example | {NORM_BIT}
    payloads = {n: tensors for n, tensors in sorted(reply.payloads.items()) if n not in left_out}
    return {"": reply.update, **payloads}


def _like(old: Tensor, new: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.asarray(new)).to(old)


class _Clips(ClientSide):
    """Refuses models whose buffers travel: noise makes no variance of a variance."""

    clips = True

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse BatchNorm's running statistics.

        Raises:
            ConfigError: naming the first.
        """
        for name, value in model.named_buffers():
            if value.is_floating_point():
                raise ConfigError(
                    f"{KEY} covers what is trained, and the model sends {name}, too: take a "
                    "task.model without running statistics (resnet18_gn), or set "
                    "strategy/differential_privacy=none"
                )


# ---- central -------------------------------------------------------------------------------------


class ClippingNorm(Protocol):
    """C, and what it costs in noise to choose it."""

    value: float
    adaptive: bool

    def plan(self, size: int) -> None:
        """Take note of how many clients a round is to have."""

    def noise_multiplier(self, total: float, size: int) -> float:
        """Return that of the parts' mean, where ``total`` is that of all that is released."""

    def move(self, unclipped: float, size: int, *, noise: bool) -> None:
        """Take in how many of a round's parts were not clipped; draws from numpy's generator."""


@dataclass
class FixedNorm:
    """C as it is given."""

    value: float = 1.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        """Check the range."""
        require_range(f"{KEY}.clipping_norm", self.value, open_low=True)

    def plan(self, size: int) -> None:
        """Do nothing."""

    def noise_multiplier(self, total: float, size: int) -> float:
        """Return all of it."""
        return total

    def move(self, unclipped: float, size: int, *, noise: bool) -> None:
        """Stay."""


@dataclass
class AdaptiveNorm:
    """C that follows a quantile of the norms.

    Attributes:
        value: C, at first.
        quantile: gamma, the share of the parts that shall not be clipped.
        lr: eta, by how much C moves.
        count_stddev: s, of the noise on how many were not; None: |S| / 20.
    """

    value: float = 0.1
    quantile: float = 0.5
    lr: float = 0.2
    count_stddev: float | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range(f"{KEY}.initial_clipping_norm", self.value, open_low=True)
        require_range(f"{KEY}.target_quantile", self.quantile, high=1.0)
        require_range(f"{KEY}.clip_norm_lr", self.lr, open_low=True)
        if self.count_stddev is not None:
            require_range(f"{KEY}.count_stddev", self.count_stddev, open_low=True)

    def plan(self, size: int) -> None:
        """Settle s, so that a reply that is lost does not change it."""
        if self.count_stddev is None:
            self.count_stddev = self._stddev(size)

    def noise_multiplier(self, total: float, size: int) -> float:
        """Return z_v.

        Raises:
            ConfigError: where the count alone tells more than z allows.
        """
        stddev = self._stddev(size)
        if total >= 2 * stddev:
            raise ConfigError(
                f"{KEY}.noise_multiplier={total} with {size} clients in a round: the noise on how "
                f"many were clipped, {KEY}.count_stddev={stddev:g}, must be above "
                f"{total / 2:g}; set it higher (null: a 20th of the clients), or have more clients"
            )
        return float(compute_adaptive_noise_params(total, size, stddev)[1])

    def move(self, unclipped: float, size: int, *, noise: bool) -> None:
        """Move C towards the quantile."""
        if noise:
            unclipped = float(np.random.normal(unclipped, self._stddev(size)))  # noqa: NPY002
        share = unclipped / size
        self.value *= math.exp(-self.lr * (share - self.quantile))

    def _stddev(self, size: int) -> float:
        return size / 20 if self.count_stddev is None else self.count_stddev


class ClippingClient(_Clips):
    """Clips the client's part to the norm that the server sends, where clients clip.

    Args:
        clipping: "client", or "server": nothing is done here.
        adaptive: tell, as one more number to sum, whether the part was short enough.
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
        short, was_longer = clipped(reply, float(received[CLIPPING][NORM]))
        if not self.sends:
            return short
        bit = {UNCLIPPED: torch.tensor(0.0 if was_longer else 1.0)}
        return replace(short, payloads={**short.payloads, NORM_BIT: bit})


class CentralPrivacy(ServerSide):
    """Gives every client the mean of all parts, with noise.

    Args:
        noise_multiplier: z; 0: clipping alone.
        norm: C.
        clipping: who clips: "client", or "server", which then sees the parts as they are.
        delta: for which epsilon is reported.
        secret: draw the noise from the operating system and not from the run's seed.
        seed: of the run.
        sampler: the class of the run's.
        clients: N, if known.
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
        self.at_client = (
            require_choice(f"{KEY}.clipping", clipping, ("client", "server")) == "client"
        )
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
        self._epsilons: dict[int, float] = {}

    def init(self, params: Tensors) -> None:
        """Start from nothing released; what the accountant lacks is said now."""
        self.uploads, self.rounds = Uploads(), 0
        if self.z > 0:
            epsilon_of(self.z, 1, self.delta, KEY)

    def broadcast(self, client_id: int) -> Payloads:
        """Send C where clients clip. A client that was asked counts as one that has answered."""
        self.uploads.add(client_id)
        return {CLIPPING: {NORM: torch.tensor(self.norm.value)}} if self.at_client else {}

    def expected(self) -> Shapes:
        """One number, whether the part was short enough, where C adapts to it."""
        return {NORM_BIT: {UNCLIPPED: ()}} if self.needs else {}

    def receive(self, params: Tensors, replies: Sequence[Reply]) -> list[Reply]:
        """Return the mean of the clipped parts, with noise, in place of each reply."""
        size = len(replies)
        if self.at_client:
            short, mean = 0.0, mean_reply(replies)
            if self.needs:
                short = size * float(mean.payloads[NORM_BIT][UNCLIPPED])
        else:
            found = [clipped(reply, self.norm.value) for reply in replies]
            short = float(sum(not was_longer for _, was_longer in found))
            mean = mean_reply([reply for reply, _ in found])
        seed = np.random.SeedSequence([self.seed, self.rounds, _STREAM])
        with flower_draws_from(None if self.secret else seed):
            arrays = part_of(mean)
            multiplier = self.norm.noise_multiplier(self.z, size)
            add_gaussian_noise_inplace(
                list(arrays), compute_stdv(multiplier, self.norm.value, size)
            )
            self.norm.move(short, size, noise=self.z > 0)
        self.rounds += 1
        return stand_ins(with_part(mean, arrays), replies)

    def metrics(self) -> Mapping[str, float]:
        """Return C, and epsilon where there is noise."""
        found = {"clipping-norm": self.norm.value}
        if self.z == 0:
            return found
        if self.uploads.most not in self._epsilons:
            self._epsilons[self.uploads.most] = epsilon_of(
                self.z, self.uploads.most, self.delta, KEY
            )
        found["dp-epsilon"] = self._epsilons[self.uploads.most]
        return found | self._sampled()

    def _sampled(self) -> dict[str, float]:
        """Return epsilon for who does not know the cohorts, where Poisson sampling holds.

        The sampler takes a client all the same where it has drawn none. That must be so unlikely
        that delta does not notice.
        """
        rate = self.participation
        if self.sampler is not BernoulliSampler or rate == 1.0:
            return {}
        if self.rounds * (1 - rate) ** self.clients > 1e-3 * self.delta:
            return {}
        return {"dp-epsilon-sampled": epsilon_of(self.z, self.rounds, self.delta, KEY, rate)}

    def state_dict(self) -> Payloads:
        """Return C, the rounds and the uploads by client."""
        state = {NORM: torch.tensor(self.norm.value, dtype=torch.float64)}
        return {
            "released": {**state, "rounds": torch.tensor(self.rounds)},
            "uploads": self.uploads.tensors(),
        }

    def load_state_dict(self, state: Payloads) -> None:
        """Restore them."""
        self.norm.value = float(state["released"][NORM])
        self.rounds = int(state["released"]["rounds"])
        self.uploads = Uploads.of(state["uploads"])


# ---- local ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalMechanism:
    """Noise that a client adds to its own part, so that the server need not be trusted.

    Attributes:
        clipping_norm: C; any two parts are at most 2 C apart.
        epsilon: of one upload, by the formula above, which holds up to 1.
        delta: of the same.
        secret: draw the noise from the operating system and not from the run's seed.
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
    def sensitivity(self) -> float:
        """How far two parts can be apart."""
        return 2 * self.clipping_norm

    @property
    def noise_multiplier(self) -> float:
        """The noise' standard deviation over the sensitivity."""
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon


class LocalPrivacyClient(_Clips):
    """Clips the client's part and adds noise; its losses and accuracies stay with it."""

    def __init__(self, mechanism: LocalMechanism | None = None) -> None:
        self.mechanism = mechanism or LocalMechanism()

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with noise."""
        mechanism = self.mechanism
        short, _ = clipped(reply, mechanism.clipping_norm)
        with flower_draws_from(None if mechanism.secret else seed):
            noised = add_localdp_gaussian_noise_to_params(
                ndarrays_to_parameters(list(part_of(short))),
                mechanism.sensitivity,
                mechanism.epsilon,
                mechanism.delta,
            )
        metrics = {name: reply.metrics[name] for name in _NEEDED if name in reply.metrics}
        return replace(with_part(short, parameters_to_ndarrays(noised)), metrics=metrics)


class LocalPrivacyServer(ServerSide):
    """Counts how often each client has uploaded.

    Args:
        mechanism: the clients' own.
    """

    def __init__(self, mechanism: LocalMechanism | None = None) -> None:
        self.mechanism = mechanism or LocalMechanism()
        self.uploads = Uploads()
        self._epsilons: dict[int, float] = {}

    def init(self, params: Tensors) -> None:
        """Start from no upload; what the accountant lacks is said now."""
        self.uploads = Uploads()
        self._epsilon(1)

    def broadcast(self, client_id: int) -> Payloads:
        """Send nothing. A client that was asked counts as one that has uploaded."""
        self.uploads.add(client_id)
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Return epsilon of all its uploads, for the client that was asked most often."""
        return {"dp-epsilon": self._epsilon(self.uploads.most)}

    def state_dict(self) -> Payloads:
        """Return the uploads by client."""
        return {"uploads": self.uploads.tensors()}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore them."""
        self.uploads = Uploads.of(state["uploads"])

    def _epsilon(self, uploads: int) -> float:
        if uploads not in self._epsilons:
            mechanism = self.mechanism
            self._epsilons[uploads] = epsilon_of(
                mechanism.noise_multiplier, uploads, mechanism.delta, KEY
            )
        return self._epsilons[uploads]
