"""Attacks on the update, or on what a method's clients send beside it; the rest is sent as it is.

ScaledUpdate    a u; with a = -1 the turned sign of Li, Xu, Chen, Giannakis, Ling. AAAI 2019.
                                        https://arxiv.org/abs/1811.03761
Gaussian        N(0, s^2) in place of the update: Blanchard et al. 2017, s = 200
                                        https://arxiv.org/abs/1703.02757
ALIE            mean - z std            A little is enough: Baruch, Baruch, Goldberg. NeurIPS 2019.
                                        https://arxiv.org/abs/1902.06156
InnerProduct    -e mean                 Xie, Koyejo, Gupta. UAI 2019.
                                        https://arxiv.org/abs/1903.03936

ALIE's and InnerProduct's attackers know each other and no honest client: they take mean and
standard deviation of their own honest updates, the papers' variant without omniscience. Each
computes the others' updates itself, from the state of a client that has not taken part yet. So all
send the same, with methods that keep no state at the clients; with others, such as SCAFFOLD,
each counts its own update with the state that it has.

PayloadLie: the lies beside an honest update are

control_variate_lie     c_i+ - c_i of SCAFFOLD and FedPVR, times a factor
soft_label_lie          the sums of soft labels by class (FedDW, FedDistill+): each class's
                        probabilities go to the next class
projection_lie          MA-Echo's projections times a factor; beyond 1 the server refuses them
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import NotNegative, Positive, Text, Whole
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import Payloads, Reply, Tensors


class ScaledUpdate(Attack):
    """Sends a multiple of the update; with factor -1 its sign is turned."""

    variants = MappingProxyType({"scaled_update": {}, "sign_flip": {"factor": -1.0}})

    factor: float = -10.0
    """factor on the update; -10 turns its sign and makes it ten times as long"""

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        return replace(reply, update={n: self.factor * value for n, value in reply.update.items()})


class Gaussian(Attack):
    """Sends noise."""

    option = "gaussian"

    stddev: Positive = 1.0
    """standard deviation of every number"""

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        draw = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        noise = {
            name: (self.stddev * torch.randn(value.shape, generator=draw)).to(value)
            for name, value in reply.update.items()
        }
        return replace(reply, update=noise)


class InnerProduct(Attack):
    """Sends the hostile clients' mean update with its sign turned."""

    option = "inner_product"

    factor: Positive = 0.5
    """e, of its length"""

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        mean, _ = moments([reply, *self.benign()])
        return replace(reply, update={name: -self.factor * value for name, value in mean.items()})


class ALIE(Attack):
    """Sends an update that is shifted by as much as others' spread may hide (a little is enough).

    By default z is the paper's z_max, of N clients of which m are hostile:
    s = floor(N / 2 + 1) - m and Phi(z_max) = (N - m - s) / (N - m).
    """

    option = "alie"

    z: NotNegative | None = None
    """standard deviations; null: what the number of clients hides"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if len(self.hostile) < 2:
            raise ConfigError(
                "attack.clients names one client, and attack=alie takes the spread of the hostile "
                "clients' updates: name two or more"
            )
        if self.z is None and len(self.hostile) > self.num_clients // 2:
            raise ConfigError(
                f"attack.clients names {len(self.hostile)} of {self.num_clients} clients, and a "
                "majority may send anything: set attack.z"
            )
        if self.z is None:
            self.z = z_max(self.num_clients, len(self.hostile))

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        assert self.z is not None
        mean, stddev = moments([reply, *self.benign()])
        shifted = {name: value - self.z * stddev[name] for name, value in mean.items()}
        return replace(reply, update=shifted)


def z_max(num_clients: int, hostile: int) -> float:
    """Return the most standard deviations that a majority's spread hides; at least 0.

    At most half of the clients are hostile.
    """
    honest = num_clients - hostile
    needed = num_clients // 2 + 1 - hostile
    share = (honest - needed) / honest
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0.0 else 0.0


def moments(replies: Sequence[Reply]) -> tuple[Tensors, Tensors]:
    """Return mean and standard deviation of the updates at every coordinate."""
    updates = [reply.update for reply in sorted(replies, key=lambda reply: reply.client_id)]
    stacked = {name: torch.stack([one[name] for one in updates]) for name in updates[0]}
    return (
        {name: values.mean(0) for name, values in stacked.items()},
        {name: values.std(0, correction=0) for name, values in stacked.items()},
    )


class PayloadLie(Attack):
    """Sends a payload's tensors scaled, and their last dimension rolled."""

    variants = MappingProxyType(
        {
            "control_variate_lie": {"payload": "control_variate_delta", "factor": -10.0},
            "projection_lie": {"payload": "projections", "factor": 0.0},
            "soft_label_lie": {"payload": "soft_label_sums", "roll": 1},
        }
    )

    payload: Text
    """name of the payload"""
    factor: float = 1.0
    """factor on all its numbers"""
    roll: Whole = 0
    """places by which its matrices are rolled along their last dimension"""

    def check_method(self, payloads: Collection[str], *, num_classes: int) -> None:
        """Refuse a method that does not have the payload."""
        super().check_method(payloads, num_classes=num_classes)
        if self.payload not in payloads:
            raise ConfigError(
                f"attack.payload={self.payload} is none that the clients of this method send; "
                f"they send: {', '.join(sorted(payloads)) or 'none'}"
            )

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with it."""
        lie = {name: self._changed(value) for name, value in reply.payloads[self.payload].items()}
        return replace(reply, payloads={**reply.payloads, self.payload: lie})

    def _changed(self, value: Tensor) -> Tensor:
        return self.factor * (torch.roll(value, self.roll, -1) if value.dim() > 1 else value)
