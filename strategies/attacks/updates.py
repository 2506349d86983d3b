"""Attacks on the update; payloads and buffers are sent as they are.

ScaledUpdate    a u; with a = -1 the turned sign of Li, Xu, Chen, Giannakis, Ling. AAAI 2019.
                                        https://arxiv.org/abs/1811.03761
Gaussian        N(0, s^2) in place of the update: Blanchard et al. 2017, s = 200
                                        https://arxiv.org/abs/1703.02757
ALIE            mean - z std            A little is enough: Baruch, Baruch, Goldberg. NeurIPS 2019.
                                        https://arxiv.org/abs/1902.06156
InnerProduct    -e mean                 Xie, Koyejo, Gupta. UAI 2019.
                                        https://arxiv.org/abs/1903.03936

ALIE's and InnerProduct's attackers know each other and no honest client: mean and standard
deviation are of their own honest updates, the variant of the papers without omniscience. Each of
them computes the others' updates itself, from the state of a client that has not taken part yet. So
all send the same, with methods that keep no state at the clients; with others, such as SCAFFOLD,
each counts its own update with the state that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch

from fedhet.common.errors import ConfigError, require_range
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import Payloads, Reply, Tensors


@dataclass(kw_only=True, eq=False)
class ScaledUpdate(Attack):
    """Sends a multiple of the update.

    Attributes:
        factor: a.
    """

    factor: float = -10.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_range("attack.factor", self.factor, low=float("-inf"))

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        return replace(reply, update={n: self.factor * value for n, value in reply.update.items()})


@dataclass(kw_only=True, eq=False)
class Gaussian(Attack):
    """Sends noise.

    Attributes:
        stddev: s of every number, > 0.
    """

    stddev: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_range("attack.stddev", self.stddev, open_low=True)

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        draw = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        noise = {
            name: (self.stddev * torch.randn(value.shape, generator=draw)).to(value)
            for name, value in reply.update.items()
        }
        return replace(reply, update=noise)


@dataclass(kw_only=True, eq=False)
class InnerProduct(Attack):
    """Sends the hostile clients' mean update with its sign turned.

    Attributes:
        factor: e, > 0.
    """

    colludes = True

    factor: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_range("attack.factor", self.factor, open_low=True)

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        mean, _ = moments([reply, *self.benign()])
        return replace(reply, update={name: -self.factor * value for name, value in mean.items()})


@dataclass(kw_only=True, eq=False)
class ALIE(Attack):
    """Sends an update that is shifted by as much as others' spread may hide.

    Attributes:
        z: how many standard deviations; None: the paper's z_max, of N clients of which m are
            hostile, s = floor(N / 2 + 1) - m and Phi(z_max) = (N - m - s) / (N - m).
    """

    colludes = True

    z: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if len(self.hostile) < 2:
            raise ConfigError(
                "attack.clients names one client, and attack=alie takes the spread of the hostile "
                "clients' updates: name two or more"
            )
        if self.z is None:
            self.z = z_max(self.num_clients, len(self.hostile))
        require_range("attack.z", self.z)

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        assert self.z is not None
        mean, stddev = moments([reply, *self.benign()])
        shifted = {name: value - self.z * stddev[name] for name, value in mean.items()}
        return replace(reply, update=shifted)


def z_max(num_clients: int, hostile: int) -> float:
    """Return the most standard deviations that a majority's spread hides; at least 0."""
    honest = num_clients - hostile
    needed = num_clients // 2 + 1 - hostile
    share = (honest - needed) / honest if honest else 0.0
    return max(0.0, NormalDist().inv_cdf(share)) if 0.0 < share < 1.0 else 0.0


def moments(replies: Sequence[Reply]) -> tuple[Tensors, Tensors]:
    """Return mean and standard deviation of the updates at every coordinate."""
    updates = [reply.update for reply in sorted(replies, key=lambda reply: reply.client_id)]
    stacked = {name: torch.stack([one[name] for one in updates]) for name in updates[0]}
    return (
        {name: values.mean(0) for name, values in stacked.items()},
        {name: values.std(0, correction=0) for name, values in stacked.items()},
    )
