"""FedCM: federated learning with client-level momentum.

Xu, Wang, Wang, Yao. 2021. https://arxiv.org/abs/2106.10874

A client's step mixes its gradient with the direction of the last round's aggregate (Algorithm 2):

    v <- alpha g(y) + (1 - alpha) m
    y <- y - eta_l v

m is as long as a gradient: m <- - Delta / mean_i lr_sum_i, with the round's aggregate Delta.
``lr_sum``, the sum of the step sizes that client i really took, stands for K eta_l, and the mean
weighs clients as Delta does. m starts at zero, so the steps of round 1 are alpha times FedAvg's.
alpha = 1 is FedAvg (with a plain mean); the paper has alpha = .1. m travels down (d numbers).

alpha multiplies the gradient of the whole local objective, penalties of other methods included.
Clipping sees v; weight decay comes after it and is not multiplied, as in FL-Simulator's code.
fedhet rejects a local optimizer with momentum, and Adam: their displacement is not a mean of
gradients, and m would be 1 / (1 - momentum) times too long. It also rejects methods that move a
client's start (FedInit, FedALA, IFCA): y_i - x is then more than its steps.

lr_sum is the client's own claim, and too small a mean would let m grow from round to round. Under a
robust aggregator it is their median, and m is no longer than the median of ||U_i|| / lr_sum_i.

In asynchronous rounds, Delta = sum_i w_i U_i is discounted, and m is - Delta over sum_i w_i, so
late replies do not make it shorter. fedhet rejects FedAsync's updates (``towards_model``): they go
from the server's present model to y_i, and are not gradients.

An aggregate longer than the mean of the updates (norm_mean, FedMRUR's line 15) makes the momentum
longer, too, so the step differs from the recipe's eta_l. Let G_i be U_i without the momentum's
part, over alpha: how far the gradients alone would have moved client i. With G orthogonal between
rounds, and c = alpha / sqrt(1 - (1 - alpha)^2) (.229 at .1), ||Delta|| tends to

    c ||mean_i G_i||      for the plain mean (FedCM), and to
    c rms_i ||G_i||       where the aggregate is as long as the updates (FedMRUR).

The rows have ``gradient_reach``, rms_i ||G_i||, and ``effective_step``, whichever of the two
applies. With ``source=mean``, m comes from the clients' mean update, and only the model moves by
the stretched aggregate: by an update's length, sqrt(alpha^2 rms^2 + (1 - alpha)^2 c^2 ||mean_i
G_i||^2).
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import ShareAboveZero
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Reads,
    ReplySum,
    ServerSide,
    Tensors,
    zeros_like,
)
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.method import Method, MethodPart
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.update_diagnostics import norm

MOMENTUM = "momentum"
LONG = 2.0  # times the plain mean's step: from here on a stretched aggregate is worth a warning

Source = Literal["aggregate", "mean"]
_log = logging.getLogger(__name__)


class ClientMomentumClient(ClientSide):
    """The client half: mixes the momentum into every gradient, whose weight is alpha."""

    needs = compressible = frozenset({MOMENTUM})

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse momentum and Adam."""
        if stateful := optimizer.stateful([name for name, _ in model.named_parameters()]):
            raise ConfigError(
                "client momentum reads a gradient off plain SGD steps, but the local optimizer "
                f"takes others on {sorted(stateful)}: set local.optimizer=sgd (or sam) and "
                "local.momentum=0"
            )

    def correct(self, grads: Tensors, context: LocalContext) -> None:
        """Replace the gradient g by alpha g + (1 - alpha) m."""
        momentum = context.received[MOMENTUM]
        if mixed := [grads[name] for name in momentum]:  # none where every tensor is personal
            torch._foreach_mul_(mixed, self.alpha)
            torch._foreach_add_(mixed, list(momentum.values()), alpha=1.0 - self.alpha)

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Refuse phases that train shared tensors in different numbers of steps."""
        sums = {summary.lr_sum_of(name) for name in context.received[MOMENTUM]} - {0.0}
        if len(sums) > 1:
            raise ConfigError(
                "client momentum divides every tensor's change by the same steps, and "
                "strategy.phases trains some of them longer: train all that are shared together"
            )
        return {}


class ClientMomentumServer(ServerSide):
    """The server half: keeps m; the arguments are :class:`ClientMomentum`'s."""

    sends, kept = frozenset({MOMENTUM}), (MOMENTUM,)
    reads = Reads.STEPS

    def __init__(self, alpha: float, source: Source) -> None:
        self.alpha = alpha
        self.source = source
        self._figures: dict[str, float] = {}
        self._warned = False

    def init(self, params: Tensors) -> None:
        """Start m at zero."""
        self.momentum = zeros_like(params)

    def broadcast(self, client_id: int) -> Payloads:
        """Send m."""
        return {MOMENTUM: self.momentum}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """m <- - Delta / mean lr_sum, of stale replies without their discount."""
        whole = math.fsum(total.weights)
        lr_sum = _lr_sum(total, robust=cohort.robust)
        mean = {name: value / whole for name, value in total.update.items()}
        update = {name: value / whole for name, value in update.items()}
        self._figures = self._steps(replace(total, update=mean), update, lr_sum)
        if cohort.summed:  # rms_i ||G_i|| takes single replies
            self._figures.pop("gradient_reach", None)
        moved = mean if self.source == "mean" else update
        self.momentum = {name: value / -lr_sum for name, value in moved.items()}
        if cohort.robust:
            longest = statistics.median(reply.norm / reply.lr_sum for reply in total.replies)
            factor = min(1.0, longest / (norm(self.momentum) or math.inf))
            self.momentum = {name: factor * value for name, value in self.momentum.items()}

    def metrics(self) -> Mapping[str, float]:
        """Return ``gradient_reach``, where single replies are known, and ``effective_step``."""
        return self._figures

    def _steps(self, total: ReplySum, update: Tensors, lr_sum: float) -> dict[str, float]:
        """Return the figures; exact if all clients take the same steps, without clipping."""
        if not total.update:
            return {}
        kept = 1.0 - self.alpha
        pull = {name: value * (-kept * lr_sum) for name, value in self.momentum.items()}
        alone = {name: value - pull[name] for name, value in total.update.items()}
        of_mean, of_alone, whole = norm(total.update), norm(alone), math.fsum(total.weights)
        pairs = zip(total.weights, total.replies, strict=True)
        squares = math.fsum(weight / whole * reply.norm**2 for weight, reply in pairs)
        # the mean of ||U_i - pull||^2, by the squares of the means it is made of
        reach = math.sqrt(max(squares + of_alone**2 - of_mean**2, 0.0)) / self.alpha
        plain, stretch = of_alone / self.alpha, norm(update) / of_mean if of_mean else 1.0
        length = self.alpha / math.sqrt(1.0 - kept**2)
        step = length * plain
        if stretch > 1.0 + 1e-3 and self.source == "mean":
            step = math.hypot(self.alpha * reach, kept * step)
        elif stretch > 1.0 + 1e-3:
            step = length * reach
            if reach > LONG * plain and norm(pull):  # not in round 1, which has no momentum
                self._warn(reach / plain, stretch)
        return {"gradient_reach": reach, "effective_step": step}

    def _warn(self, factor: float, stretch: float) -> None:
        if not self._warned:
            _log.warning(
                "The aggregate is %.2f times as long as the mean update, and the momentum with it: "
                "steps tend to %.1f times the plain mean's, at this step size, with a memory of "
                "%.2f a round. A smaller local.lr, or strategy.client_momentum.source=mean, takes "
                "this back",
                *(stretch, factor, stretch * (1.0 - self.alpha)),
            )
        self._warned = True


def _lr_sum(total: ReplySum, *, robust: bool) -> float:
    """Return the mean lr_sum of the replies, weighted as their updates are, or their median."""
    sums = [reply.lr_sum for reply in total.replies]
    if robust:
        return statistics.median(sums)
    pairs = zip(total.weights, sums, strict=True)
    return math.fsum(weight * one for weight, one in pairs) / math.fsum(total.weights)


class ClientMomentum(MethodPart):
    """FedCM's momentum: clients mix the last round's mean direction into their gradients."""

    name = "client_momentum"
    # Models that start apart: their displacement is not a sum of gradients.
    requires = MappingProxyType({"local.initial": "received"})

    alpha: ShareAboveZero = 0.1
    """weight of the fresh gradient; 1 is FedAvg"""
    source: Source = "aggregate"
    """what m is made from: aggregate (FedCM and MoFedSAM, and the literal reading of FedMRUR's
    Algorithm 1) | mean (the clients' mean update, before norm_mean stretches it: FedMRUR, if its
    code stretches only the server's step, as the code that it builds on suggests)"""

    def parts(self) -> Parts:
        """Add the two halves."""
        return Parts(
            client_sides={"client_momentum": ClientMomentumClient(self.alpha)},
            server_sides={"client_momentum": ClientMomentumServer(self.alpha, self.source)},
        )


class FedCM(Method):
    """FedCM (Xu et al. 2021): momentum at the clients, along the last mean update; for few clients
    a round, since clients keep no state.

    With ``strategy/aggregator=norm_mean`` it is FedCM+.
    """

    client_momentum: ClientMomentum = ClientMomentum()

    def parts(self) -> Parts:
        """Average the updates without weights."""
        return Parts(aggregator=UniformMean())
