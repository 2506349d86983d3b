"""FedAMP: personalized cross-silo federated learning on non-IID data, by attentive messages.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang. AAAI 2021. https://arxiv.org/abs/2007.03797

There is no global model. The server keeps every client's last model w_i and sends client i its own
cloud model u_i, in which models close to w_i weigh more (Algorithm 1):

    u_i = (1 - sum_j a_ij) w_i + sum_j a_ij w_j
    a_ij = alpha exp(-||w_i - w_j||^2 / sigma) / sigma
    w_i <- argmin L_i(w) + lambda / (2 alpha) ||w - u_i||^2

with j over the other clients. The client takes its local steps on that objective from its last
w_i, as in PFLlib's code. In round 1 all w_i are equal, so u_i is w_i; a client that the server
does not know yet is pulled to its start, too. lambda = 0 is local training.

alpha / sigma is the weight of a client with the same model: with N clients it must be at most
1 / (N - 1), for u_i to be a mean. With the recipe's alpha = .1 and sigma = 1, ten clients that
agree weigh .1 each; PFLlib has 1 for both, and for lambda.

The recipe keeps all tensors at the clients (strategy.personal=all); u_i and w_i travel as payloads,
without buffers. The server computes N distances for every client in a round.

PFLlib's code weighs only the clients of the last round and adds ||w - u_i|| without the square,
from detached tensors: that term has no gradient, so its clients train alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative, Positive
from fedhet.strategies.base import (
    ClientSide,
    LocalContext,
    LocalSummary,
    Payloads,
    Reply,
    ServerSide,
    Shapes,
    Step,
    Tensors,
)
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.server_model import ServerModel

CLOUD = "cloud_model"  # u_i
OWN = "own_model"  # w_i


class FedAMPClient(ClientSide):
    """Trains near u_i and sends w_i; ``coefficient`` is lambda / alpha."""

    needs, sends = frozenset({CLOUD}), frozenset({OWN})

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def begin(self, context: LocalContext) -> None:
        """Take u_i; where there is none, the start of training."""
        self.cloud = context.received[CLOUD] or _model(context)

    def penalty(self, step: Step) -> Tensor | None:
        """Return lambda / (2 alpha) ||w - u_i||^2, a scalar."""
        if self.coefficient == 0.0:
            return None
        squares = [(step.params[n] - u).square().sum() for n, u in self.cloud.items()]
        return self.coefficient / 2 * torch.stack(squares).sum()

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Send w_i."""
        return {OWN: _model(context)}


def _model(context: LocalContext) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in context.params.items() if p.requires_grad}


class FedAMPServer(ServerSide):
    """Keeps the clients' models and mixes one for each client."""

    needs, sends = frozenset({OWN}), frozenset({CLOUD})

    def __init__(self, alpha: float, sigma: float) -> None:
        self.alpha, self.sigma = alpha, sigma

    def bind(self, network: ServerModel) -> None:
        """Take the shapes of the trainable tensors: ``init`` has none, as nothing is shared."""
        named = network.model.named_parameters()
        self.shapes = {name: tuple(p.shape) for name, p in named if p.requires_grad}

    def init(self, params: Tensors) -> None:
        """Start without models."""
        self.models: dict[int, dict[str, Tensor]] = {}

    def state_dict(self) -> Payloads:
        """Return all models as one; their tensors have the names CLIENT:TENSOR."""
        return {"models": {f"{i}:{n}": v for i, m in self.models.items() for n, v in m.items()}}

    def load_state_dict(self, state: Payloads) -> None:
        """Restore the models."""
        for key, value in state["models"].items():
            client, _, name = key.partition(":")
            self.models.setdefault(int(client), {})[name] = value

    def expected(self) -> Shapes:
        """Return the model's shapes."""
        return {OWN: self.shapes}

    def receive(self, params: Tensors, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Keep the round's models."""
        self.models |= {reply.client_id: dict(reply.payloads[OWN]) for reply in replies}
        return replies

    def broadcast(self, client_id: int) -> Payloads:
        """Send u_i; nothing to a client without a model here."""
        own = self.models.get(client_id, {})
        others = [model for j, model in self.models.items() if j != client_id]
        weighted = [(self.alpha * self._attention(own, other), other) for other in others]
        return {
            CLOUD: {
                name: value + sum(a * (other[name] - value) for a, other in weighted if a)
                for name, value in own.items()
            }
        }

    def _attention(self, own: Tensors, other: Tensors) -> float:
        """Return exp(-||w_i - w_j||^2 / sigma) / sigma."""
        distance = sum(float((v - other[n]).double().square().sum()) for n, v in own.items())
        return math.exp(-distance / self.sigma) / self.sigma


class FedAMP(Method):
    """FedAMP (Huang et al. 2021): personalised; the server mixes for every client a model of those
    close to its own, and the client trains near it. For silos that fall into groups.
    """

    replaces = frozenset({"personal"})
    settings = MappingProxyType({"strategy.personal": "all", "evaluation.model": "clients"})

    alpha: Positive = 0.1
    """the step size of the mixing; alpha / sigma is the weight of a client with the same model"""
    sigma: Positive = 1.0
    """the squared distance of two models over which the weight falls by the factor e"""
    coefficient: NotNegative = 0.1
    """lambda; the client is pulled to the mix with lambda / alpha; 0 is local training"""

    def parts(self) -> Parts:
        """Add both halves."""
        return Parts(
            client_sides={"fedamp": FedAMPClient(self.coefficient / self.alpha)},
            server_sides={"fedamp": FedAMPServer(self.alpha, self.sigma)},
        )
