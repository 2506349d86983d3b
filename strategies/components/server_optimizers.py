"""Server optimizers: x <- step(x, Delta).

SGD with momentum is FedAvgM (Hsu, Qi, Brown 2019, https://arxiv.org/abs/1909.06335), with Delta
the mean update (not its negative):

    v <- momentum v + Delta
    x <- x + eta_g v

Adagrad, Adam and Yogi are Algorithm 2 of Reddi et al., Adaptive Federated Optimization, ICLR 2021
(https://arxiv.org/abs/2003.00295), with the same Delta, without bias correction, v_{-1} = tau^2:

    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                        (FedAdagrad)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)          (FedYogi)
    v <- beta2 v + (1 - beta2) Delta^2                      (FedAdam)
    x <- x + eta_g m / (sqrt(v) + tau)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any

import torch
from torch import Tensor

from fedhet.common.configured import Option, Refers
from fedhet.common.kinds import Positive, Share
from fedhet.strategies.base import Cohort, Tensors, zeros_like
from fedhet.strategies.slots import ServerOptimizer


class _ServerOptimizer(Option, ServerOptimizer):
    group = "strategy/server_optimizer"

    lr: Annotated[Positive, Refers("${server.lr}")] = 1.0
    """eta_g"""


class SGD(_ServerOptimizer):
    """x <- x + eta_g v with v <- momentum v + Delta; momentum 0 and eta_g 1 is FedAvg."""

    option = "sgd"
    kept = ("velocity",)

    momentum: Share = 0.0
    """momentum of the mean update (FedAvgM: 0.9)"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.velocity: dict[str, Tensor] = {}

    def init(self, params: Tensors) -> None:
        """Start from the initial params."""
        self.velocity = zeros_like(params) if self.momentum else {}

    def step(self, params: Tensors, update: Tensors, cohort: Cohort) -> dict[str, Tensor]:
        """Return the params after one step along ``update``."""
        direction = update
        if self.momentum:
            self.velocity = {n: self.momentum * v + update[n] for n, v in self.velocity.items()}
            direction = self.velocity
        # torch refuses an alpha beyond float32, which is infinite there
        lr = self.lr if self.lr <= torch.finfo(torch.float32).max else math.inf
        return {name: torch.add(x, direction[name], alpha=lr) for name, x in params.items()}


class _Adaptive(_ServerOptimizer):
    """The part that FedAdagrad, FedAdam and FedYogi share: all but the second moment."""

    kept = ("first", "second")

    lr: Annotated[Positive, Refers("${server.lr}")] = 0.1
    beta1: Share = 0.9
    """decay of the first moment"""
    tau: Positive = 0.001
    """adaptivity: added to the root of the second moment"""

    def init(self, params: Tensors) -> None:
        """Start from the initial params."""
        self.first = zeros_like(params)
        self.second = {n: torch.full_like(v, self.tau**2) for n, v in params.items()}

    @abstractmethod
    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        """Return the new v of the old one and Delta^2, element by element."""

    def step(self, params: Tensors, update: Tensors, cohort: Cohort) -> dict[str, Tensor]:
        """Return the params after one step along ``update``."""
        stepped = {}
        for name, value in params.items():
            delta = update[name]
            self.first[name] = self.beta1 * self.first[name] + (1 - self.beta1) * delta
            self.second[name] = self.second_moment(self.second[name], delta**2)
            scale = self.second[name].sqrt() + self.tau
            stepped[name] = value + self.lr * self.first[name] / scale
        return stepped


class Adagrad(_Adaptive):
    """FedAdagrad; beta1 is 0 in the paper."""

    option = "adagrad"

    beta1: Share = 0.0

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        """Return v + Delta^2."""
        return moment + square


class Adam(_Adaptive):
    """FedAdam."""

    option = "adam"

    beta2: Share = 0.99
    """decay of the second moment"""

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        """Return beta2 v + (1 - beta2) Delta^2."""
        return self.beta2 * moment + (1 - self.beta2) * square


class Yogi(_Adaptive):
    """FedYogi."""

    option = "yogi"

    beta2: Share = 0.99
    """decay of the second moment"""

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        """Return v - (1 - beta2) Delta^2 sign(v - Delta^2)."""
        return moment - (1 - self.beta2) * square * torch.sign(moment - square)
