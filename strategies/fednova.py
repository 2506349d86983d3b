"""FedNova: tackling the objective inconsistency problem in heterogeneous federated optimization.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. https://arxiv.org/abs/2007.07481

FedAvg weighs a client by n_i and, implicitly, by its steps: with different K_i it converges to the
optimum of another objective. FedNova averages directions of equal length (eq. 9):

    y_i - x = - eta_l sum_k a_ik g_ik            |a_i|: the sum of the weights a_ik
    Delta   = tau_eff sum_i p_i (y_i - x) / |a_i|,      p_i = n_i / sum_j n_j,
              tau_eff = sum_i p_i |a_i|

|a_i| = K_i for plain SGD; with local momentum m, (K_i - m (1 - m^K_i) / (1 - m)) / (1 - m)
(section 4). With equal |a_i| this is FedAvg. Adam is rejected: its step is not a sum of gradients.

A client sends eta_l |a_i|, one number for each shared tensor, because training phases and
local.momentum_layers make them differ. (eta_l cancels; a tensor that nobody moved stays.)
Where the paper differs: FedProx's proximal term, and weight decay, are in a_ik there; here they
are part of g_ik. Its released code takes tau_eff = sum_i p_i K_i beside the proximal term.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Reads,
    RefusedReplyError,
    Reply,
    ServerSide,
    Shapes,
    Tensors,
    Weighting,
)
from fedhet.strategies.components.local_optimizers import reach
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

REACH = "fednova_reach"


class FedNovaClient(ClientSide):
    """Sends eta_l |a_i| of every shared tensor, in alphabetical order of their names."""

    sends = frozenset({REACH})
    dtypes = MappingProxyType({REACH: torch.float64})

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse Adam."""
        if optimizer.momentum is None:
            raise ConfigError(
                "FedNova divides updates by the weights of their gradients, and Adam's steps have "
                "none: set local.optimizer=sgd"
            )

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Send them (number of tensors,)."""
        reaches = [summary.reach_of(name) for name in sorted(context.anchor)]
        return {REACH: {"reach": torch.tensor(reaches, dtype=torch.float64)}}


class FedNovaServer(ServerSide):
    """Refuses |a_i| that no client of the recipe can have."""

    needs = frozenset({REACH})

    def init(self, params: Tensors) -> None:
        """Note the number of tensors."""
        self.size = len(params)

    def expected(self) -> Shapes:
        """One number a tensor (number of tensors,)."""
        return {REACH: {"reach": (self.size,)}}

    def check(self, reply: Reply) -> None:
        """Refuse numbers below those of one step, or above those of all steps with momentum 1.

        Every gradient weighs 1 at least: momentum only adds to that, and proximal terms are in the
        gradient. A tensor that no phase trains has 0, and its change does not count.
        """
        found = reply.payloads[REACH]["reach"]
        least = reply.lr_sum / reply.num_steps  # eta_l, less where phases leave steps out
        most = reach(reply.num_steps, 1.0) * least
        moved = found[found != 0]
        if not ((moved >= least * (1 - 1e-6)) & (moved <= most * (1 + 1e-6))).all():
            raise RefusedReplyError(
                f"its {REACH} is from {float(found.min()):g} to {float(found.max()):g}: it must be "
                f"0, or from {least:g} to {most:g}, which {reply.num_steps} steps can have"
            )


class NormalizedMean:
    """The mean of updates, each divided by its |a_i|, times tau_eff."""

    weighs: Weighting = "examples"  # p_i
    reads = Reads.REPLIES | Reads.STEPS  # it would stretch what clients moved by without a step

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the aggregate."""
        examples = torch.tensor([float(reply.num_examples) for reply in replies])
        shares = (examples / examples.sum()).double()
        reaches = torch.stack([reply.payloads[REACH]["reach"].double() for reply in replies])
        effective = shares @ reaches  # tau_eff by tensor
        factors = shares[:, None] * effective / torch.where(reaches > 0, reaches, torch.inf)
        delta = {}
        for name, column in zip(sorted(params), factors.T.tolist(), strict=True):
            scaled = [c * reply.update[name] for c, reply in zip(column, replies, strict=True)]
            delta[name] = torch.stack(scaled).sum(0)
        return delta


class FedNova(Method):
    """FedNova (Wang et al. 2020): divides every client's update by its local steps, for clients
    that take very different numbers of steps.
    """

    replaces = frozenset({"aggregator"})
    # Models that start apart differ by more than their steps.
    requires = MappingProxyType({"strategy.aggregator": None, "local.initial": "received"})

    def parts(self) -> Parts:
        """Divide the updates by the reach that the clients send."""
        return Parts(
            client_sides={"fednova": FedNovaClient()},
            server_sides={"fednova": FedNovaServer()},
            aggregator=NormalizedMean(),
        )
