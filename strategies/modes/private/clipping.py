"""Clipping of a client's upload to a norm C, fixed or adaptive.

Fixed       McMahan, Ramage, Talwar, Zhang. ICLR 2018. https://arxiv.org/abs/1710.06963
Adaptive    Andrew, Thakkar, McMahan, Ramaswamy. NeurIPS 2021. https://arxiv.org/abs/1905.03871

The update and the payloads of a client, as one vector v, are clipped together:

    v <- v min(1, C / ||v||)
    adaptive    C <- C exp(-eta (b - gamma)),   b = 1/2 + (sum_i (b_i - 1/2) + N(0, s^2)) / m

with b_i = 1 if ||v_i|| <= C, else 0, and m the expected number of clients in a round. One client
more moves the sum in b by 1/2, as the paper's accounting assumes.

Payloads that are sums over examples are not part of v: they have their own mechanism
(gaussian_mechanism.py). In the paper and here b is the share of updates that are *not* clipped.
Flower's wrappers take the clipped share, so C runs away from its quantile.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedhet.common.configured import Option
from fedhet.common.errors import ConfigError
from fedhet.common.flower.clipping import (
    adaptive_clip_inputs_inplace,
    compute_adaptive_noise_params,
    get_norm,
)
from fedhet.common.kinds import Delta
from fedhet.strategies.base import ClientSide, Reply, ServerSide, Tensors
from fedhet.strategies.modes.private.gaussian_mechanism import Noise
from fedhet.strategies.slots import ClientSampler

KEY = "strategy.differential_privacy"
NORM_BIT = "norm_bit"  # payload: 1 from a client whose upload was not clipped

Arrays = list[NDArray[np.float64]]


class Privacy(Option):
    """Clips what clients send, and adds noise."""

    group = "strategy/differential_privacy"

    delta: Delta = 1.0e-5
    """delta of (epsilon, delta) privacy; the rows report epsilon"""
    reproducible_noise: bool = False
    """true: the noise follows from the seed, so a run can be repeated to the bit, and whoever knows
    the seed can remove the noise"""

    def halves(self, sampler: ClientSampler | None) -> tuple[ClientSide, ServerSide]:
        """Return the two halves; ``sampler`` is the run's."""
        raise NotImplementedError


def arrays_of(reply: Reply) -> Arrays:
    """Return copies of the arrays that are clipped together."""
    return [
        tensors[name].detach().double().cpu().numpy().copy()
        for tensors in _clipped_tensors(reply).values()
        for name in sorted(tensors)  # the noise must not depend on the order of arrival
    ]


def with_arrays(reply: Reply, arrays: Arrays) -> Reply:
    """Return the reply with these arrays in place of those of :func:`arrays_of`."""
    values = iter(arrays)
    changed = {
        group: {n: torch.from_numpy(np.asarray(next(values))).to(tensors[n]) for n in names}
        for group, tensors in _clipped_tensors(reply).items()
        for names in [sorted(tensors)]
    }
    new = changed.pop("")
    update = {name: new[name] for name in reply.update}
    return replace(reply, update=update, payloads={**reply.payloads, **changed})


def clip(reply: Reply, norm: float) -> tuple[Reply, bool]:
    """Return the reply clipped to ``norm``, and whether it was longer."""
    arrays = arrays_of(reply)
    if get_norm(arrays) == 0.0:  # Flower divides by it
        return reply, False
    was_longer = adaptive_clip_inputs_inplace(arrays, norm)
    return (with_arrays(reply, arrays), True) if was_longer else (reply, False)


def _clipped_tensors(reply: Reply) -> dict[str, Tensors]:
    """Return the update as "", and the payloads by name."""
    left_out = reply.per_example | {NORM_BIT}
    payloads = {n: tensors for n, tensors in sorted(reply.payloads.items()) if n not in left_out}
    return {"": reply.update, **payloads}


@dataclass
class FixedNorm:
    """A constant clipping norm C."""

    adaptive: ClassVar[bool] = False
    value: float

    def noise_multiplier(self, total: float, size: int) -> float:
        """Return z of the mean, if everything that is released has ``total`` together."""
        return total

    def move(self, unclipped: float, clients: int, size: int, noise: Noise | None) -> None:
        """Do nothing: C is constant."""


@dataclass
class AdaptiveNorm:
    """A clipping norm that follows a quantile of the uploads' norms."""

    adaptive: ClassVar[bool] = True
    value: float  # the current C; initially the first one
    quantile: float  # gamma, the share of uploads that should stay unclipped
    lr: float  # eta, the learning rate of C
    count_stddev: float | None  # s, of the noise on the number of unclipped uploads; None: m / 20

    def noise_multiplier(self, total: float, size: int) -> float:
        """Return z_v = (z^-2 - (2 s)^-2)^(-1/2), with m = ``size``: mean and count have z."""
        stddev = self._stddev(size)
        if total >= 2 * stddev:
            raise ConfigError(
                f"{KEY}.count_stddev={stddev:g} is too small for noise_multiplier={total} and "
                f"{size} clients in a round: it must be above {total / 2:g}; set it higher (null: "
                "a 20th of the clients), or use more clients"
            )
        return float(compute_adaptive_noise_params(total, size, stddev)[1])

    def move(self, unclipped: float, clients: int, size: int, noise: Noise | None) -> None:
        """Adapt C to the number of unclipped uploads of a round's ``clients``; m = ``size``."""
        centred = unclipped - clients / 2
        if noise is not None:
            centred += float(noise(self._stddev(size), ()))
        self.value *= math.exp(-self.lr * (0.5 + centred / size - self.quantile))

    def _stddev(self, size: int) -> float:
        return size / 20 if self.count_stddev is None else self.count_stddev


ClippingNorm = FixedNorm | AdaptiveNorm


def require_no_buffers(client_sides: Mapping[str, ClientSide], shared: Collection[str]) -> None:
    """Reject BatchNorm's running statistics that travel (``shared``) under differential privacy.

    A noisy variance is no variance.
    """
    if shared and any(side.clips for side in client_sides.values()):
        raise ConfigError(
            f"strategy/differential_privacy covers trained tensors only, and the model also sends "
            f"{min(shared)}: choose a task.model without running statistics (resnet18_gn), keep "
            "them at the clients (strategy.personal), or set strategy/differential_privacy=none"
        )
